"""What the ranks and links of a runahead chain have to do, and when they are predicted to have done it."""

from __future__ import annotations

from dataclasses import dataclass

from megakv.costmodel.timeline import LayerWork, Times

Message = tuple[int, tuple[int, ...]]
"""Who computed it, and its tokens of each sequence."""


@dataclass(frozen=True)
class ChainPrediction:
    """When the ranks of a chain end their layers.

    Parameters
    ----------
    seconds : float
        TTFT: the last rank's last layer, and the logits.
    ends_s : array
        ``[N, layers]`` when each rank has computed each layer.
    waited_s : array
        ``[N, layers]`` how long it waited for the prefix in it.
    """

    seconds: float
    ends_s: Times
    waited_s: Times

    @property
    def busy_s(self) -> list[float]:
        """``[N]`` how long each rank works, all layers together."""
        busy: list[float] = (self.ends_s[:, -1] - self.waited_s.sum(axis=1)).tolist()
        return busy


@dataclass(frozen=True)
class ChainParts:
    """What the ranks and links of a chain have to do, each as if nothing else ran.

    Parameters
    ----------
    messages : list
        Per rank, tokens of each sequence in the messages that carry its own keys and values.
    incoming : list
        Per rank, the messages that it receives in a layer, in order.
    works : list of LayerWork
        Per rank.
    links : list of array
        Per rank that sends, seconds of the messages it sends in a layer: its own, then those it received.
    visits : (float, float), optional
        Seconds of the last layer's wanted queries: attention to them on every rank, and their way round. None where the
        last layer is like all others, because the last rank collects its keys and values.
    """

    messages: list[list[tuple[int, ...]]]
    incoming: list[list[Message]]
    works: list[LayerWork]
    links: list[Times]
    visits: tuple[float, float] | None = None
