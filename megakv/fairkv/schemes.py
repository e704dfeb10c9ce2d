"""Replicas with equal shares: how often each head is copied, and where the replicas go, by branch and bound.

The schemes are those of the paper's Algorithm 1. Algorithm 2's exhaustive placing of each is replaced by a placing of
all of them at once, the largest replica first, and a search of those whose bound leaves room for something better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from megakv.fairkv.assignment import NODES, TOLERANCE, positive
from megakv.fairkv.limits import CopyLimits

MOST_SCHEMES = 12_000


@dataclass(frozen=True)
class EvenPlacement:
    """Ranks of every head, the load of the slowest rank, and a bound that no such placement is below."""

    ranks: tuple[tuple[int, ...], ...]
    slowest: float
    bound: float


def copy_schemes(heads: int, copies: int, *, max_replicas: int, copied_heads: int) -> Iterator[tuple[int, ...]]:
    """Algorithm 1: every way to give heads extra replicas, which the paper's listing does not bound.

    Parameters
    ----------
    heads : int
    copies : int
        C: extra replicas of all heads together, at most.
    max_replicas : int
        R_max: of one head.
    copied_heads : int
        CH: heads with more than one replica, at most.

    Yields
    ------
    tuple of int
        Replicas of each head.
    """

    def extend(scheme: tuple[int, ...], left: int, copied: int) -> Iterator[tuple[int, ...]]:
        if len(scheme) == heads:
            yield scheme
            return
        yield from extend((*scheme, 1), left, copied)
        if copied:
            for extra in range(1, min(left, max_replicas - 1) + 1):
                yield from extend((*scheme, 1 + extra), left - extra, copied - 1)

    yield from extend((), copies, copied_heads)


@lru_cache(maxsize=32)
def _scheme_table(heads: int, limits: CopyLimits) -> tuple[NDArray[np.int64], bool]:
    """[schemes, heads], the heads being sorted by budget, and whether these are all there are.

    Where there are too many, only the largest heads are copied: as many of them as keep the table small.
    """
    copied = heads if limits.copied_heads is None else limits.copied_heads
    copies = limits.most(heads)
    largest = heads
    while largest > 1 and comb(largest + copies, copies) > MOST_SCHEMES:
        largest -= 1
    while True:
        rows = list(copy_schemes(largest, copies, max_replicas=limits.replicas, copied_heads=copied))
        table = np.ones((len(rows), heads), dtype=np.int64)
        table[:, :largest] = rows
        table = table[table.sum(axis=1) >= limits.tp_size]
        if len(table):
            return table, largest == heads
        largest += 1


def _bounds(sizes: NDArray[np.float64], table: NDArray[np.int64], total: float, tp_size: int) -> NDArray[np.float64]:
    """[schemes]: a load that the slowest rank cannot be below."""
    bounds = np.maximum(sizes.max(axis=1), total / tp_size)
    most = int(table.sum(axis=1).max())
    spread = np.zeros((len(table), most))
    ends = table.cumsum(axis=1)
    for head in range(table.shape[1]):
        for extra in range(int(table[:, head].max())):
            rows = np.nonzero(table[:, head] > extra)[0]
            spread[rows, ends[rows, head] - 1 - extra] = sizes[rows, head]
    spread = -np.sort(-spread, axis=1)
    # Of the first kR + 1 replicas some rank has k + 1.
    for k in range(1, (most - 1) // tp_size + 1):
        bounds = np.maximum(bounds, spread[:, k * (tp_size - 1) : k * tp_size + 1].sum(axis=1))
    return bounds


def _largest_first(
    sizes: NDArray[np.float64], table: NDArray[np.int64], tp_size: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Slowest load of every scheme when its largest replicas go to the emptiest ranks; the order of its heads."""
    order = np.argsort(-sizes, axis=1, kind="stable")
    ordered, counts = np.take_along_axis(sizes, order, 1), np.take_along_axis(table, order, 1)
    loads = np.zeros((len(table), tp_size))
    places = np.arange(tp_size)
    for step in range(table.shape[1]):
        loads += np.where(places < counts[:, step : step + 1], ordered[:, step : step + 1], 0.0)
        loads.sort(axis=1)
    return loads[:, -1], order


class _Search:
    """Places the replicas of one scheme after the other, depth first, the largest first."""

    def __init__(self, tp_size: int, limit: int, bound: float):
        self.tp_size, self.limit, self.bound = tp_size, limit, bound
        self.best = float("inf")
        self.found: list[tuple[int, ...]] = []
        self.nodes = 0

    @property
    def exhausted(self) -> bool:
        return self.nodes <= self.limit

    def run(self, order: Sequence[int], sizes: Sequence[float], counts: Sequence[int]) -> None:
        """Look for a placement of one scheme that beats the best so far."""
        self.order, self.sizes, self.counts = order, sizes, counts
        self.left = [0.0] * (len(order) + 1)
        self.least = [float("inf")] * (len(order) + 1)
        for step in range(len(order) - 1, -1, -1):
            head = order[step]
            self.left[step] = self.left[step + 1] + sizes[head] * counts[head]
            self.least[step] = min(self.least[step + 1], sizes[head])
        self.loads = [0.0] * self.tp_size
        self.held: list[tuple[int, ...]] = [()] * len(order)
        self.seen: set[tuple[float, ...]] = set()
        self._visit(0)

    def _visit(self, step: int) -> bool:
        """Whether to stop."""
        if step == len(self.order):
            self.best, self.found = max(self.loads), list(self.held)
            return self.best <= self.bound * (1 + TOLERANCE)
        self.nodes += 1
        if not self.exhausted:
            return True
        loads, target = self.loads, self.best * (1 - TOLERANCE)
        state = (step, *sorted(loads))
        if state in self.seen:
            return False
        self.seen.add(state)
        head = self.order[step]
        size, count = self.sizes[head], self.counts[head]
        places = [rank for rank in sorted(range(self.tp_size), key=loads.__getitem__) if loads[rank] + size < target]
        if len(places) < count:
            return False
        least = self.least[step]
        if sum(target - load for load in loads if target - load > least) < self.left[step] * (1 - TOLERANCE):
            return False
        tried = set()
        for ranks in combinations(places, count):
            before = tuple(loads[rank] for rank in ranks)
            if before in tried or max(before) + size >= self.best * (1 - TOLERANCE):
                continue
            tried.add(before)
            for rank in ranks:
                loads[rank] += size
            self.held[head] = ranks
            stop = self._visit(step + 1)
            for rank, load in zip(ranks, before, strict=True):
                loads[rank] = load
            if stop:
                return True
        return False


def place_evenly(weights: Sequence[float], limits: CopyLimits, *, nodes: int = NODES) -> EvenPlacement:
    """Copies and places the heads of a layer so that the slowest rank is fastest, replicas sharing a head equally.

    Exact unless the search is cut off at `nodes`, or there are too many schemes to look at.

    Parameters
    ----------
    weights : sequence of float
        Budget of each head, not negative.
    limits : CopyLimits
    nodes : int
    """
    size, total = limits.tp_size, sum(weights)
    heads = sorted(range(len(weights)), key=lambda head: -weights[head])
    ordered = np.array(sorted(positive(weights), reverse=True))
    table, complete = _scheme_table(len(weights), limits)
    sizes = ordered / table
    reached, order = _largest_first(sizes, table, size)
    bounds = _bounds(sizes, table, float(ordered.sum()), size)
    lowest = float(bounds.min()) if complete else float(ordered.sum()) / size
    search = _Search(size, nodes, lowest)
    first = int(reached.argmin())
    search.best = float(reached[first]) * (1 + 2 * TOLERANCE)
    search.run(*_scheme(first, order, sizes, table))
    promising = np.nonzero(bounds < search.best * (1 - TOLERANCE))[0]
    for row in promising[np.lexsort((reached[promising], bounds[promising]))]:
        if search.best <= lowest * (1 + TOLERANCE) or not search.exhausted:
            break
        if bounds[row] < search.best * (1 - TOLERANCE):
            search.run(*_scheme(int(row), order, sizes, table))
    ranks: list[tuple[int, ...]] = [()] * len(weights)
    for head, places in zip(heads, _filled(search.found, size), strict=True):
        ranks[head] = tuple(sorted(places))
    loads = [0.0] * size
    for weight, held in zip(weights, ranks, strict=True):
        for rank in held:
            loads[rank] += weight / len(held)
    slowest = max(loads)
    proven = search.exhausted and complete
    # What was added to heads that keep nothing is no part of the bound.
    bound = slowest if proven else max(0.0, lowest - (float(ordered.sum()) - total))
    return EvenPlacement(tuple(ranks), slowest, min(bound, slowest))


def _filled(placed: Sequence[tuple[int, ...]], tp_size: int) -> list[tuple[int, ...]]:
    """The same with a replica for every rank: an empty one takes it from one that has several, and nobody is slower."""
    found = list(placed)
    count = [sum(rank in held for held in found) for rank in range(tp_size)]
    for empty in [rank for rank in range(tp_size) if not count[rank]]:
        full = max(range(tp_size), key=count.__getitem__)
        head = next(head for head, held in enumerate(found) if full in held)
        found[head] = tuple(empty if rank == full else rank for rank in found[head])
        count[full], count[empty] = count[full] - 1, 1
    return found


def _scheme(
    row: int, order: NDArray[np.int64], sizes: NDArray[np.float64], table: NDArray[np.int64]
) -> tuple[list[int], list[float], list[int]]:
    return order[row].tolist(), sizes[row].tolist(), table[row].tolist()
