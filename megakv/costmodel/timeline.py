"""What one rank of the runahead chain does when, and the link before it, over all layers."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


class LayerWork(NamedTuple):
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
        return LayerWork(*(each[:layers] for each in self))

    def slower(self, factor: float) -> LayerWork:
        """The same work beside something that takes part of the processor."""
        return LayerWork(*(each * factor for each in self))


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
    carried = [float(link.sum(axis=-1).mean()) for link in links] + [0.0] * (len(works) - len(links))
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
    return [work._replace(after=work.after + rest) for work, rest in zip(works, slack, strict=True)]


class ChainRank:
    """One rank of the chain, whose prefix comes over one link, one chunk behind the other: what happens there when.

    handed: ``[layers, J]`` when the rank before hands each chunk to the link.
    seconds: ``[J]``, or ``[layers, J]``, how long each is on its way.
    held: chunks that the rank makes room for at a time: the next one sets out when one of them was attended to.
    """

    def __init__(self, work: LayerWork, handed: Times, seconds: Times, *, held: int):
        self.work = work
        self.clock = 0.0
        # By layer, when it begins and ends; when each chunk of the prefix has arrived and is taken up, and how long it
        # was on its way.
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.arrivals: list[list[float]] = []
        self.pickups: list[list[float]] = []
        self.transfers: list[list[float]] = np.broadcast_to(seconds, handed.shape).tolist()
        self._handed: list[list[float]] = handed.tolist()
        self._attention: list[list[float]] = work.chunks.tolist()
        self._others = list(zip(work.before.tolist(), work.local.tolist(), work.after.tolist(), strict=True))
        self._arrived = 0.0
        self._freed = [0.0] * held
        self._slot = 0

    def layer(self) -> None:
        """The next layer."""
        layer, freed, slot, arrived = len(self.starts), self._freed, self._slot, self._arrived
        self.starts.append(self.clock)
        before, local, after = self._others[layer]
        clock = self.clock + before + local
        arrivals, pickups = [], []
        for ready, transfer, attention in zip(
            self._handed[layer], self.transfers[layer], self._attention[layer], strict=True
        ):
            arrived = max(ready, arrived, freed[slot]) + transfer
            arrivals.append(arrived)
            clock = max(clock, arrived)
            pickups.append(clock)
            clock += attention
            freed[slot] = clock
            slot = (slot + 1) % len(freed)
        self.arrivals.append(arrivals)
        self.pickups.append(pickups)
        self.clock = clock + after
        self.ends.append(self.clock)
        self._slot, self._arrived = slot, arrived

    def run(self) -> Self:
        """All layers."""
        for _ in self._others:
            self.layer()
        return self

    def handing(self, own: int) -> Times:
        """``[layers, J]`` when it hands its `own` chunks to the next rank, and those that it received."""
        begun = np.repeat((np.array(self.starts) + self.work.before)[:, None], own, axis=1)
        return np.concatenate([begun, np.array(self.pickups)], axis=1)

    @property
    def waited(self) -> Times:
        """``[layers]`` how long it waits for chunks."""
        waited: Times = np.array(self.ends) - np.array(self.starts) - self.work.total
        return waited
