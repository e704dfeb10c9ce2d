"""One layer's KV heads on ranks: the largest first, a search where a bound leaves room for better, and exchanges where
that is cut off.

The same for all that a layer may be: no copies, replicas with equal shares (items that go to several places), and heads
cut between the ranks of a group (a place as fast as its ranks together). `Schemes` are the ways to copy or to group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megakv.cache.splitting import TOLERANCE

Criterion = Literal["slowest", "difference"]

NODES = 40_000
"""Of the search in one layer, after which the best found so far is taken: 8 KV heads rarely need as many."""
LEAST = 1e-8
"""Of all budgets together: what a head counts at least, so that no rank is left with nothing at all."""


@dataclass(frozen=True)
class Schemes:
    """Ways to place heads that are sorted by budget, the largest first.

    ``counts[scheme, head]`` places divide a head equally; a place has ``speeds[scheme, place]`` ranks. `complete`:
    whether these are all ways that there are.
    """

    counts: NDArray[np.int64]
    speeds: NDArray[np.int64]
    complete: bool = True


@dataclass(frozen=True)
class Placement:
    """Places of every head under the best scheme, its value by the criterion, and what no placement's is below."""

    scheme: int
    places: list[tuple[int, ...]]
    value: float
    bound: float


def positive(weights: Sequence[float]) -> list[float]:
    """The same with a little for heads that keep nothing."""
    total = sum(weights)
    least = total * LEAST if total > 0 else 1.0
    return [max(weight, least) for weight in weights]


def lower_bounds(sizes: NDArray[np.float64], schemes: Schemes, start: float = 0.0) -> NDArray[np.float64]:
    """[schemes]: a time that the slowest place cannot be below; `sizes` are those of single replicas, and every place
    has `start` without any.
    """
    fastest, places = schemes.speeds.max(axis=1), schemes.speeds.shape[1]
    ends = schemes.counts.cumsum(axis=1)
    replicas = np.arange(ends[:, -1].max())
    # [schemes, replicas]: the size of each, nothing where a scheme has fewer.
    head = (replicas[None, :, None] >= ends[:, None, :]).sum(axis=2)
    spread = np.take_along_axis(np.pad(sizes, ((0, 0), (0, 1))), head, axis=1)
    spread = -np.sort(-spread, axis=1)
    bounds = (spread.sum(axis=1) + start * places) / schemes.speeds.sum(axis=1)
    # Of the first kR + 1 replicas some place has k + 1.
    for k in range((len(replicas) - 1) // places + 1):
        bounds = np.maximum(bounds, (spread[:, k * (places - 1) : k * places + 1].sum(axis=1) + start) / fastest)
    return bounds


def largest_first(
    sizes: NDArray[np.float64], schemes: Schemes, start: float = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Every scheme at once: the time of places [schemes, places], and who is where [schemes, heads, places]."""
    rows, heads = sizes.shape
    places = schemes.speeds.shape[1]
    loads = np.full((rows, places), start)
    held = np.zeros((rows, heads, places), dtype=bool)
    order = np.argsort(-sizes, axis=1, kind="stable")
    row = np.arange(rows)
    rank = np.arange(places)
    for step in range(heads):
        head = order[:, step]
        size = sizes[row, head]
        first = np.argsort((loads + size[:, None]) / schemes.speeds, axis=1, kind="stable")
        chosen = np.zeros((rows, places), dtype=bool)
        np.put_along_axis(chosen, first, rank < schemes.counts[row, head][:, None], axis=1)
        loads += chosen * size[:, None]
        held[row, head] = chosen
    return loads / schemes.speeds, held


def exchange(
    sizes: NDArray[np.float64], speeds: NDArray[np.int64], held: NDArray[np.bool_], start: float = 0.0
) -> NDArray[np.bool_]:
    """Move replicas off the slowest place, or exchange them for others, until that helps no more; [heads, places]."""
    held = held.copy()
    while True:
        loads = sizes @ held + start
        slow = int(np.argmax(loads / speeds))
        best, step = loads[slow] / speeds[slow] * (1 - TOLERANCE), None
        for other in range(len(speeds)):
            mine = np.flatnonzero(held[:, slow] & ~held[:, other])
            theirs = np.flatnonzero(held[:, other] & ~held[:, slow])
            change = sizes[mine, None] - np.append(0.0, sizes[theirs])
            value = np.maximum((loads[slow] - change) / speeds[slow], (loads[other] + change) / speeds[other])
            if value.size and value.min() < best:
                one, two = np.unravel_index(int(value.argmin()), value.shape)
                best, step = value.min(), (mine[one], theirs[two - 1] if two else None, other)
        if step is None:
            return held
        for head, source, goal in ((step[0], slow, step[2]), (step[1], step[2], slow)):
            if head is not None:
                held[head, source], held[head, goal] = False, True


class _Search:
    """Depth first, the largest replica first, for a placement that beats the best so far.

    With a `mean` load it is beaten by a smaller difference between the fullest and the emptiest place, all as fast.
    """

    def __init__(self, best: float, nodes: int, *, start: float = 0.0, mean: float | None = None):
        self.best, self.nodes, self.start, self.mean = best, nodes, start, mean

    def run(self, sizes: Sequence[float], counts: Sequence[int], speeds: Sequence[int]) -> NDArray[np.bool_] | None:
        """Which heads are at which places; None where nothing better is found."""
        self.found: NDArray[np.bool_] | None = None
        self.speeds, self.loads = speeds, [self.start] * len(speeds)
        self.items = sorted(zip(sizes, counts, range(len(sizes)), strict=True), key=lambda item: -item[0])
        self.left = [sum(size * count for size, count, _ in self.items[step:]) for step in range(len(sizes))]
        self.held = np.zeros((len(sizes), len(speeds)), dtype=bool)
        self.seen: set[tuple] = set()
        self._visit(0)
        return self.found

    def _visit(self, step: int) -> None:
        loads, speeds = self.loads, self.speeds
        if step == len(self.items):
            times = list(map(float.__truediv__, loads, speeds))
            value = max(times) - (0.0 if self.mean is None else min(times))
            if value < self.best * (1 - TOLERANCE):
                self.best, self.found = value, self.held.copy()
            return
        self.nodes -= 1
        state = (step, *sorted(zip(speeds, loads, strict=True)))
        if self.nodes < 0 or state in self.seen:
            return
        self.seen.add(state)
        size, count, head = self.items[step]
        target = self._most()
        places = [place for place, load in enumerate(loads) if load + size < target * speeds[place]]
        places.sort(key=lambda place: loads[place] / speeds[place])
        room = [target * speed - load for speed, load in zip(speeds, loads, strict=True)]
        if sum(free for free in room if free > self.items[-1][0]) < self.left[step] * (1 - TOLERANCE):
            return
        if self.mean is not None and sum(max(0.0, 2 * self.mean - target - load) for load in loads) > self.left[step]:
            return
        tried = set()
        for chosen in combinations(places, count):
            before = tuple((speeds[place], loads[place]) for place in chosen)
            best = self._most()
            if before in tried or any(load + size >= best * speed for speed, load in before):
                continue
            tried.add(before)
            for place in chosen:
                loads[place] += size
            self.held[head] = False
            self.held[head, chosen] = True
            self._visit(step + 1)
            for place, (_, load) in zip(chosen, before, strict=True):
                loads[place] = load

    def _most(self) -> float:
        """What places, per speed, stay below where a placement beats the best; as much above the mean as below it."""
        best = self.best * (1 - TOLERANCE)
        # The others of as many places are on average as far from the mean as the fullest is, divided by their number.
        return best if self.mean is None else self.mean + best * (1 - 1 / len(self.speeds))


def assign(
    weights: Sequence[float],
    schemes: Schemes,
    *,
    nodes: int = NODES,
    fixed: float = 0.0,
    start: float = 0.0,
    criterion: Criterion = "slowest",
) -> Placement:
    """Place heads, positive and the largest first, so that the slowest place is fastest, or so that places, all as
    fast, have the smallest difference between the fullest and the emptiest of them.

    Each replica takes `fixed` beside its part of the weight, and each place `start`, which may be negative, beside its
    replicas. Exact unless the search is cut off at `nodes`; the bound then says how far from the optimum it can be.
    """
    sizes, speeds = np.asarray(weights) / schemes.counts + fixed, schemes.speeds
    bounds = lower_bounds(sizes, schemes, start)
    times, placed = largest_first(sizes, schemes, start)
    reached = times.max(axis=1)
    mean: float | None = None
    if criterion == "difference":
        assert not fixed and not start
        places = speeds.shape[1]
        mean = sum(weights) / places
        reached = reached - times.min(axis=1)
        bounds = np.maximum(0.0, bounds - mean) * places / max(1, places - 1)
    scheme = int(reached.argmin())
    held, search = placed[scheme], _Search(float(reached[scheme]), nodes, start=start, mean=mean)
    for row in np.lexsort((reached, bounds)):
        if search.nodes < 0 or bounds[row] >= search.best * (1 - TOLERANCE):
            break
        found = search.run(sizes[row].tolist(), schemes.counts[row].tolist(), speeds[row].tolist())
        scheme, held = (scheme, held) if found is None else (int(row), found)
    value = lowest = search.best
    if search.nodes < 0 and mean is None:
        held = exchange(sizes[scheme], speeds[scheme], held, start)
        value = float(((sizes[scheme] @ held + start) / speeds[scheme]).max())
    if search.nodes < 0 or not schemes.complete:
        least = sum(weights) + fixed * len(weights) + start * speeds.shape[1]
        anyway = least / float(speeds[0].sum()) if mean is None else 0.0
        lowest = min(value, float(bounds.min()) if schemes.complete else anyway)
    return Placement(scheme, [tuple(np.flatnonzero(row).tolist()) for row in held], value, lowest)
