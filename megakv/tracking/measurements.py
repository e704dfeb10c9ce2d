"""What ranks measure: events, traffic, offloaded passes, the balance of KV heads. Plain data that goes to JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field

from megakv.base.loads import barrier_utilisation, busy_rates

PERCENTILES = (50, 90, 99)
CAPTURED = "cuda_graph"
"""How it is counted, beside attention methods, where a layer was part of a CUDA graph."""
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
# What a file may hold: numbers that sums, ratios and axes of pictures can bear.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
MOST_SECONDS = 1e9


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median and tails of some times, as ``name/p50`` and so on; nothing of none."""
    values = np.percentile(seconds, PERCENTILES) if len(seconds) else ()
    return {f"{name}/p{share}": float(value) for share, value in zip(PERCENTILES, values, strict=False)}


@dataclass(frozen=True, slots=True)
class Event:
    """One stretch of time on one rank, in seconds since the run's common zero (the start of ``generate``).

    ``communication`` is a transfer in flight, which compute may hide; ``wait`` is time in which the rank stood
    still for it. ``layer`` is the decoder layer it belongs to, ``None`` where there is none.
    """

    name: str
    kind: Literal["compute", "communication", "wait"]
    start: float
    end: float
    layer: int | None = None
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def __post_init__(self) -> None:
        if self.kind not in ("compute", "communication", "wait"):
            raise ValueError(f"event {self.name!r} has kind {self.kind!r}; it must be compute, communication or wait")
        if not -MOST_SECONDS <= self.start <= self.end <= MOST_SECONDS:
            raise ValueError(
                f"event {self.name!r} runs from {self.start} to {self.end} s; it must end after it starts, within "
                f"{MOST_SECONDS:.0f} s"
            )


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one operation cost a rank in one layer, or outside the layers (``None``).

    `seconds` run from posting to completion; in the exposed part of them the rank did nothing but wait.
    """

    operation: str
    layer: int | None
    calls: Count
    bytes_sent: Count
    seconds: float
    seconds_exposed: float
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def __post_init__(self) -> None:
        if min(self.calls, self.bytes_sent) < 0 or not 0 <= self.seconds_exposed <= self.seconds <= MOST_SECONDS:
            raise ValueError(f"{self.operation!r} in layer {self.layer} has counts or times that no run can have")


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How a prompt was spread over the ranks before its layers ran."""

    # The method asked for, or what ``auto`` found fastest: ``single``, ``runahead``, ``pass_kv`` or ``pass_q``.
    chosen: str
    # Per sequence, consecutive tokens of every rank; ``None`` where they were spread in balanced chunks.
    partitions: list[list[Count]] | None
    predicted_s: dict[str, Number]  # Predicted time to first token of everything that ``auto`` chose from.
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class CandidateCounts:
    """Tokens that were proposed and checked, several in a step (prompt lookup, assisted decoding)."""

    steps: Count  # Passes of the whole generation, each of which gave at least one token.
    proposed: Count
    accepted: Count
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def scalars(self, new_tokens: int) -> dict[str, float]:
        """As flat metrics."""
        shares = {"tokens_per_step": new_tokens / self.steps} if self.steps else {}
        return shares | ({"accepted_share": self.accepted / self.proposed} if self.proposed else {})


@dataclass(frozen=True, slots=True)
class ProductRates:
    """Library that multiplies some rows by weights on processors, and how fast all were that could have done it."""

    first: Count  # Fewest and most rows; ``None`` for any number.
    last: Count | None
    library: str
    flops: dict[str, Number]  # By library, operations a second of a made-up product.
    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """Logits along the tokens of a run, where these part from those of plain transformers on one process."""

    # Where tokens part first: which answer and which of its tokens, counted from 1.
    answer: Count
    token: Count
    gap: Number  # By which plain transformers prefers another token than the run, at most.
    moved: Number  # Largest difference between both in a logit of such tokens.
    difference: Number  # Largest difference between both in any logit.
    # Largest difference between ways to run plain transformers: by one attention and another, and token by token.
    spread: Number
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def near_tie(self) -> bool:
        """Whether tokens part because of rounding: by no more than plain transformers differs from itself."""
        return max(self.gap, self.moved) <= self.spread

    def __str__(self) -> str:
        return (
            f"answer {self.answer}, token {self.token}: logits of tokens in question are up to {self.gap:.3g} apart "
            f"in plain transformers and up to {self.moved:.3g} off it, all logits up to {self.difference:.3g}; plain "
            f"transformers' own spread is {self.spread:.3g}"
        )


@dataclass(frozen=True, slots=True)
class OffloadStep:
    """One pass over keys and values that lie off the accelerator."""

    # The method that it was planned by; ``all`` for one in which activations are recomputed and the host attends.
    plan: str
    # Cached tokens of all sequences; of them, in each layer, those whose keys and values stay on the accelerator, those
    # recomputed from activations (the split point), those attended to by the host, and those before the windows of all
    # queries. They are counted as it happens, which may be otherwise than planned: all but the first are means over
    # layers.
    cached: Count
    resident: Count
    recomputed: Count
    on_host: Count
    # From the end of the pass before to the end of this one.
    predicted_s: Number
    measured_s: Number
    waited_s: Number  # In which the accelerator stood still for the link or the host.
    # To the accelerator and from it.
    bytes_in: Count
    bytes_out: Count
    # Weights that the pass needed; what is brought ahead counts for the pass in which it comes.
    weight_bytes: Count = 0
    # Bits of each key and value off the accelerator where they are quantised: results are lossy then.
    kv_bits: int | None = None
    # `bytes_in` as a share of what the link carries in `measured_s`, by its measured bandwidth.
    link_utilisation: Number = 0.0
    # Of `bytes_in`, what was read from disk, and as a share of what the disk gives in `measured_s`.
    disk_bytes: Count = 0
    disk_utilisation: Number = 0.0
    # Whether speeds of the machine were measured in the course of it, or read from their file: that takes time which
    # was not predicted.
    profiled: bool = False
    out_of_window: Count = 0
    # Beside the cached tokens what compression kept, as many as so many tokens of all heads; of it, what the host
    # attended to: the rest was sent.
    kept: Count = 0
    kept_on_host: Count = 0
    # Of the batch, in which its sequences went through layers; 1: row by row.
    groups: Count = 1
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def streamed(self) -> int:
        """Tokens whose keys and values were sent."""
        return self.cached - self.resident - self.recomputed - self.on_host - self.out_of_window


def offload_totals(steps: Sequence[OffloadStep]) -> dict[str, float | None]:
    """Sums over passes; shares of the cached tokens, and of what link and disk carry in the time of the passes.

    None where nothing was timed or predicted.
    """
    names = ("predicted_s", "measured_s", "waited_s", "bytes_in", "bytes_out", "weight_bytes", "disk_bytes")
    sums: dict[str, float] = {name: sum(getattr(step, name) for step in steps) for name in names}
    values: dict[str, float | None] = {**sums}
    for name in ("link_utilisation", "disk_utilisation"):
        carried = sum(getattr(step, name) * step.measured_s for step in steps)
        values[name] = carried / sums["measured_s"] if sums["measured_s"] else None
    for name in ("resident", "recomputed", "on_host", "out_of_window"):
        values[f"{name}_share"] = sum(getattr(step, name) for step in steps) / max(1, sum(s.cached for s in steps))
    # Passes in which speeds were measured took time that was not predicted.
    usual = [step for step in steps if not step.profiled]
    took = sum(step.measured_s for step in usual)
    values["prediction_error"] = sum(step.predicted_s for step in usual) / took - 1 if took else None
    return values


def offload_scalars(ranks: Sequence[Sequence[OffloadStep]]) -> dict[str, float]:
    """Totals over ranks and passes as flat metrics; passes by plan are means over ranks."""
    steps = [step for rank in ranks for step in rank]
    totals = offload_totals(steps) if steps else {}
    values = {f"offload/{name}": float(value) for name, value in totals.items() if value is not None}
    if any(step.groups > 1 for step in steps):
        values["offload/groups"] = float(np.median([step.groups for step in steps]))
    counts = Counter(step.plan for step in steps)
    return values | {f"offload/passes/{plan}": counts[plan] / len(ranks) for plan in sorted(counts)}


@dataclass(frozen=True, slots=True)
class HeadBalance:
    """What KV heads cost the ranks of a run."""

    # File that the heads were placed by, and the SHA-256 of its content; ``None`` where heads are in runs.
    mapping: str | None
    digest: str | None
    # What the mapping promised for its profile: mean load over the slowest rank's, averaged over layers.
    mapped_utilisation: Number | None
    kept_tokens: list[Count]  # By rank: tokens held, summed over its KV heads and all layers.
    kept_utilisation: Number  # The same as `mapped_utilisation` of the tokens that heads really hold.
    # By rank: seconds in attention while single tokens were computed; empty where none were, or on an accelerator.
    attention_s: list[Number]
    # By rank: its `attention_s` over the sum, layer by layer, of those of the slowest rank beside it.
    busy_rates: list[Number]
    # Mean time in attention over the slowest rank's, averaged over layers; ``None`` where nothing was measured.
    utilisation: Number | None
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def __post_init__(self) -> None:
        ranks = len(self.kept_tokens)
        if {len(self.attention_s), len(self.busy_rates)} - {0, ranks}:
            raise ValueError(f"kept_tokens has {ranks} ranks; attention_s and busy_rates must have as many, or none")

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
    """From ``[rank][layer]`` tokens held and seconds in attention (empty where they were not measured).

    Rank r is number ``r % tp_size`` of the ranks that wait for each other in every layer. `mapping` is the file, digest
    and utilisation of the heads' placement.
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
