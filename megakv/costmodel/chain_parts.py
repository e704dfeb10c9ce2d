"""What the ranks and links of a runahead chain have to do, and when they are predicted to have done it."""

from __future__ import annotations

from dataclasses import dataclass

from megakv.costmodel.timeline import LayerWork, Times

Message = tuple[int, tuple[int, ...]]
"""Who computed it, and its tokens of each sequence."""


@dataclass(frozen=True)
class ChainPrediction:
    """When the ranks of a chain end their layers."""

    seconds: float  # TTFT: the last rank's last layer, and the logits.
    ends_s: Times  # ``[N, layers]`` when each rank has computed each layer.
    waited_s: Times  # ``[N, layers]`` how long it waited for the prefix in it.

    @property
    def busy_s(self) -> list[float]:
        """``[N]`` how long each rank works, all layers together."""
        busy: list[float] = (self.ends_s[:, -1] - self.waited_s.sum(axis=1)).tolist()
        return busy


@dataclass(frozen=True)
class ChainParts:
    """What the ranks and links of a chain have to do, each as if nothing else ran."""

    # Per rank, tokens of each sequence in the messages that carry its own keys and values.
    messages: list[list[tuple[int, ...]]]
    incoming: list[list[Message]]  # Per rank, the messages that it receives in a layer, in order.
    works: list[LayerWork]  # Per rank.
    # Per rank that sends, seconds of the messages it sends in a layer: its own, then those it received.
    links: list[Times]
    # Seconds of the last layer's wanted queries: attention to them on every rank, and their way round. None where the
    # last layer is like all others, because the last rank collects its keys and values.
    visits: tuple[float, float] | None = None
