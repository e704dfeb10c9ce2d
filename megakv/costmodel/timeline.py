"""Events of one rank of the runahead chain, and of the link before it, over all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(frozen=True)
class LayerWork:
    """Seconds of one rank's layers, by kind of layer."""

    before: Times  # ``[layers]`` projections, and packing what is sent.
    local: Times  # ``[layers]`` attention to its own tokens.
    chunks: Times  # ``[layers, J]`` attention to each chunk of the prefix, in order of arrival.
    after: Times  # ``[layers]`` output projection and feed-forward.

    @property
    def total(self) -> Times:
        """``[layers]`` all of it."""
        whole: Times = self.before + self.local + self.chunks.sum(axis=1) + self.after
        return whole

    def first(self, layers: int) -> LayerWork:
        return LayerWork(self.before[:layers], self.local[:layers], self.chunks[:layers], self.after[:layers])

    def slower(self, factor: float) -> LayerWork:
        """The same work beside something that takes part of the processor."""
        return LayerWork(self.before * factor, self.local * factor, self.chunks * factor, self.after * factor)


def added(exposed: float, other_s: float, own_s: float, exposed_other: float) -> float:
    """What part longer something takes beside another thing of which a part is exposed.

    Both run slower by a constant factor while both run: no more than the whole of the one can be slowed down. Where
    nothing of one of them is hidden, both together take the sum of their times, as if they took turns.
    """
    if own_s <= 0.0 or other_s <= 0.0:
        return 0.0
    if max(exposed, exposed_other) == 1.0:
        exposed = most = 1.0
    else:
        most = exposed * (1 - exposed_other) / (1 - exposed)
    return min(exposed * other_s / own_s, most)


def sharing(
    works: list[LayerWork], links: list[Times], transfer: float, compute: float
) -> tuple[list[LayerWork], list[Times]]:
    """Work of ranks and messages of links as they slow each other down; see `HardwareProfile.overlapped`."""
    computed = [float(work.total.mean()) for work in works]
    carried = [float(link.sum()) for link in links] + [0.0] * (len(works) - len(links))
    slower = [
        work.slower(1 + added(transfer, (carried[rank] + carried[rank - 1]) / 2, computed[rank], compute))
        for rank, work in enumerate(works)
    ]
    longer = [
        link * (1 + added(compute, (computed[rank] + computed[rank + 1]) / 2, carried[rank], transfer))
        for rank, link in enumerate(links)
    ]
    return slower, longer


def in_step(works: list[LayerWork]) -> list[LayerWork]:
    """Ranks that pass something around in every layer: none is far ahead of the slowest."""
    slowest = np.max([work.total for work in works], axis=0)
    slack = [np.append((slowest - work.total)[:-1], 0.0) for work in works]
    return [replace(work, after=work.after + rest) for work, rest in zip(works, slack, strict=True)]


@dataclass(frozen=True)
class RankEvents:
    """What one rank of the chain does when."""

    starts: Times  # ``[layers]`` when it begins and ends a layer.
    ends: Times
    pickups: Times  # ``[layers, J]`` when it takes up each chunk of the prefix.
    waited: Times  # ``[layers]`` how long it waits for chunks.


def rank_events(work: LayerWork, handed: Times, seconds: Times, *, held: int) -> RankEvents:
    """Events of a rank whose prefix comes over one link, one chunk behind the other.

    handed: ``[layers, J]`` when the rank before hands each chunk to the link.
    seconds: ``[J]`` how long each is on its way.
    held: chunks that the rank makes room for at a time: the next one sets out when one of them was attended to.
    """
    layers, count = handed.shape
    transfers, ready, attention = seconds.tolist(), handed.tolist(), work.chunks.tolist()
    before, after = (work.before + work.local).tolist(), work.after.tolist()
    pickups: list[list[float]] = []
    starts, ends, freed = [0.0] * layers, [0.0] * layers, [0.0] * held
    clock = arrived = 0.0
    for layer in range(layers):
        starts[layer] = clock
        clock += before[layer]
        taken = []
        for chunk in range(count):
            slot = (layer * count + chunk) % held
            arrived = max(ready[layer][chunk], arrived, freed[slot]) + transfers[chunk]
            clock = max(clock, arrived)
            taken.append(clock)
            clock += attention[layer][chunk]
            freed[slot] = clock
        pickups.append(taken)
        clock += after[layer]
        ends[layer] = clock
    first, last = np.array(starts), np.array(ends)
    return RankEvents(first, last, np.array(pickups).reshape(handed.shape), last - first - work.total)
