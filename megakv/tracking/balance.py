"""How evenly tensor-parallel ranks are loaded by their KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from megakv.fairkv.layer import barrier_utilisation, busy_rates


@dataclass(frozen=True, slots=True)
class HeadBalance:
    """What KV heads cost the ranks of a run.

    Attributes
    ----------
    mapping, digest
        File that the heads were placed by, and the SHA-256 of its content; ``None`` where heads are in runs.
    mapped_utilisation
        What the mapping promised for its profile: mean load over the slowest rank's, averaged over layers.
    kept_tokens
        By rank: tokens held, summed over its KV heads and all layers.
    kept_utilisation
        The same as `mapped_utilisation` of the tokens that heads really hold.
    attention_s
        By rank: seconds in attention while single tokens were computed; empty where none were, or on an accelerator.
    busy_rates
        By rank: its `attention_s` over the sum, layer by layer, of those of the slowest rank beside it.
    utilisation
        Mean time in attention over the slowest rank's, averaged over layers; ``None`` where nothing was measured.
    """

    mapping: str | None
    digest: str | None
    mapped_utilisation: float | None
    kept_tokens: list[int]
    kept_utilisation: float
    attention_s: list[float]
    busy_rates: list[float]
    utilisation: float | None
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def scalars(self) -> dict[str, float | None]:
        """The flat metrics of it."""
        values: dict[str, float | None] = {
            "fairkv/mapped_utilisation": self.mapped_utilisation,
            "fairkv/kept_utilisation": self.kept_utilisation,
            "fairkv/utilisation": self.utilisation,
        }
        values |= {f"fairkv/kept_tokens/rank{rank}": float(count) for rank, count in enumerate(self.kept_tokens)}
        return values | {f"fairkv/busy_rate/rank{rank}": rate for rank, rate in enumerate(self.busy_rates)}


def head_balance(
    kept: Sequence[Sequence[int]],
    seconds: Sequence[Sequence[float]],
    tp_size: int,
    *,
    mapping: tuple[str, str, float] | None,
) -> HeadBalance:
    """What KV heads cost the ranks of a run.

    Parameters
    ----------
    kept : sequence of sequence of int
        ``[rank][layer]`` tokens held, over its KV heads.
    seconds : sequence of sequence of float
        ``[rank][layer]`` in attention; empty where nothing was measured.
    tp_size : int
        Ranks that wait for each other in every layer; rank r is number ``r % tp_size`` of them.
    mapping : (str, str, float), optional
        File, digest and utilisation of the mapping.
    """
    layers = list(zip(*kept, strict=True))
    groups = range(0, len(kept), tp_size)
    held = [layer[first : first + tp_size] for layer in layers for first in groups]
    rates: list[float] = []
    used = None
    if all(seconds):
        times = [list(zip(*seconds[first : first + tp_size], strict=True)) for first in groups]
        rates = [rate for group in times for rate in busy_rates(group)]
        used = barrier_utilisation([layer for group in times for layer in group])
    path, digest, promised = mapping or (None, None, None)
    return HeadBalance(
        mapping=path,
        digest=digest,
        mapped_utilisation=promised,
        kept_tokens=[sum(tokens) for tokens in kept],
        kept_utilisation=barrier_utilisation(held),
        attention_s=[sum(times) for times in seconds] if rates else [],
        busy_rates=rates,
        utilisation=used,
    )
