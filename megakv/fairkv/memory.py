"""Layers against each other: mappings within each rank's memory at the least price in time, and Equation 4.

The paper's Equation 4 makes the largest load of a rank, summed over all layers, as small as it can be. That is what a
rank's memory holds, not how long a token takes: ranks meet in every layer, not once per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from megakv.fairkv import program
from megakv.fairkv.arrangement import arrange, memory_of
from megakv.fairkv.assignment import NODES, TOLERANCE, Schemes, lower_bounds
from megakv.fairkv.copying import LayerSolution, Split, map_layer
from megakv.fairkv.layer import LayerMapping
from megakv.fairkv.limits import CopyLimits

Weights = Sequence[Sequence[float]]

STEPS = 500
KICKS = 8
CLOSE = 5e-7
"""Relative: totals that near to a cap or to a bound meet it. What a solver calls feasible is as close."""


@dataclass(frozen=True)
class TotalSolution:
    """Mappings of all layers, the largest total of a rank, and a bound that no mappings are below."""

    mappings: list[LayerMapping]
    largest: float
    bound: float


class _Steps:
    """Changes mappings one step at a time: two ranks change places, heads move or are exchanged, a cut moves."""

    def __init__(self, mappings: Sequence[LayerMapping], budgets: Weights, size: int, cap: float, split: Split):
        self.cap, self.free, self.size = cap, split == "free", size
        self.tokens = np.zeros((len(budgets), len(budgets[0]), size))
        self.held = np.zeros(self.tokens.shape, dtype=bool)
        for layer, (mapping, row) in enumerate(zip(mappings, budgets, strict=True)):
            for head, (ranks, shares) in enumerate(zip(mapping.ranks, mapping.shares, strict=True)):
                self.held[layer, head, ranks] = True
                self.tokens[layer, head, ranks] = np.array(shares) * row[head]

    @property
    def loads(self) -> NDArray[np.float64]:
        """[layers, ranks]"""
        return self.tokens.sum(axis=1)

    def over(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens above the cap."""
        return np.where(totals > self.cap * (1 + CLOSE), totals - self.cap, 0.0)

    @property
    def excess(self) -> float:
        """Tokens above the cap, over all ranks."""
        return float(self.over(self.loads.sum(axis=0)).sum())

    @property
    def time(self) -> float:
        """Sum over layers of the slowest rank."""
        return float(self.loads.max(axis=1).sum())

    def mappings(self) -> list[LayerMapping]:
        """What it has come to."""
        found = []
        for tokens, held in zip(self.tokens, self.held, strict=True):
            ranks = [tuple(np.flatnonzero(row).tolist()) for row in held]
            parts = [row[list(at)].tolist() for row, at in zip(tokens, ranks, strict=True)]
            found.append(LayerMapping.even(ranks).with_shares(parts))
        return found

    def _changes(self, source: NDArray[np.int64], goal: int) -> NDArray[np.float64]:
        """[layers, changes]: tokens that each change takes from each layer's `source` to `goal`; nan: impossible."""
        at = source[:, None, None]
        mine, here = np.take_along_axis(self.tokens, at, 2)[..., 0], np.take_along_axis(self.held, at, 2)[..., 0]
        theirs, there = self.tokens[..., goal], self.held[..., goal]
        moved = np.where(here & ~there, mine, np.nan)
        back = np.pad(np.where(there & ~here, theirs, np.nan), ((0, 0), (1, 0)))
        swaps = moved[:, :, None] - back[:, None, :]
        # A rank keeps one head of each layer.
        swaps[here.sum(axis=1) == 1, :, 0] = np.nan
        loads = self.loads
        turned = np.take_along_axis(loads, source[:, None], 1) - loads[:, goal, None]
        kinds = [turned, swaps.reshape(len(source), -1)]
        if self.free:
            half, totals = mine / 2, loads.sum(axis=0)
            over, room = self.over(totals)[source, None], self.cap - totals[goal]
            for part in (half, np.minimum(half, turned / 2), over + 0 * half, room + 0 * half):
                kinds.append(np.where(here & there & (part > 0) & (part <= half), part, np.nan))
        found = np.concatenate(kinds, axis=1)
        found[source == goal] = np.nan
        return found

    def _apply(self, layer: int, change: int, source: int, goal: int, amount: float) -> None:
        tokens, held = self.tokens[layer], self.held[layer]
        heads = len(tokens)
        if change == 0:
            heads_moved = list(range(heads))
        elif change <= heads * (heads + 1):
            one, other = divmod(change - 1, heads + 1)
            heads_moved = [one, other - 1] if other else [one]
        else:
            head = (change - 1) % heads
            tokens[head, source] -= amount
            tokens[head, goal] += amount
            return
        for array in (tokens, held):
            array[np.ix_(heads_moved, [source, goal])] = array[np.ix_(heads_moved, [goal, source])]

    def _step(self, sources: Iterator[NDArray[np.int64]], *, quicken: bool, timed: bool = True) -> bool:
        """Make the best change; False if none helps."""
        loads = self.loads
        totals, slowest = loads.sum(axis=0), loads.max(axis=1, keepdims=True)
        best, step = (0.0, 0.0) if quicken else (-inf, 0.0), None
        for source in sources:
            for goal in range(self.size):
                amount = self._changes(source, goal)
                rest = loads.copy()
                np.put_along_axis(rest, source[:, None], -inf, 1)
                rest[:, goal] = -inf
                left = np.take_along_axis(loads, source[:, None], 1) - amount
                reached = np.maximum(np.maximum(left, loads[:, goal, None] + amount), rest.max(axis=1, keepdims=True))
                time = slowest - reached
                full = totals[source, None]
                over = self.over(full) + self.over(totals[goal]) - self.over(full - amount)
                excess = np.where(np.isnan(amount), -inf, over - self.over(totals[goal] + amount))
                if quicken:
                    fine = (excess >= 0) & (time > slowest * TOLERANCE)
                    first, second = np.where(fine, time, -inf), excess
                else:
                    fine = excess > self.cap * TOLERANCE
                    price = np.minimum(time, 0.0) if timed else 0.0 * time
                    first = np.where(fine, np.divide(price, excess, out=np.zeros_like(time), where=fine), -inf)
                    second = excess
                if not fine.any():
                    continue
                among = np.where(first >= first.max(), second, -inf)
                at = np.unravel_index(int(among.argmax()), among.shape)
                rating = (float(first[at]), float(second[at]))
                if rating > best:
                    best, step = rating, (int(at[0]), int(at[1]), int(source[at[0]]), goal, float(amount[at]))
        if step is not None:
            self._apply(*step)
        return step is not None

    def repair(self, *, timed: bool = True) -> None:
        """Take away the excess, each time where a token less costs least time."""
        for _ in range(STEPS):
            over = np.flatnonzero(self.over(self.loads.sum(axis=0)))
            sources = (np.full(len(self.tokens), rank) for rank in over)
            if not len(over) or not self._step(sources, quicken=False, timed=timed):
                return

    def quicken(self) -> None:
        """Take away time where that leaves every rank within its memory."""
        for _ in range(STEPS):
            if not self._step(iter([self.loads.argmax(axis=1)]), quicken=True):
                return


def _layers(budgets: Weights, limits: CopyLimits, split: Split, nodes: int) -> tuple[list[LayerSolution], list]:
    """Every layer the best for itself, and the same with the ranks renumbered so that they hold equally much."""
    solutions = [map_layer(row, limits, split, nodes=nodes) for row in budgets]
    return solutions, arrange([solution.mapping for solution in solutions], budgets, limits.tp_size)


def _shared(
    mappings: Sequence[LayerMapping], budgets: Weights, limits: CopyLimits, least: Sequence[float], cap: float | None
) -> list[LayerMapping] | None:
    """The same placements, shares chosen over all layers at once; None if they cannot be within the cap."""
    return program.solve(budgets, limits, "free", least=least, cap=cap, placed=mappings)[0]


def least_total(budgets: Weights, limits: CopyLimits, split: Split = "free", *, nodes: int = NODES) -> TotalSolution:
    """Mappings whose fullest rank, over all layers, has least: Equation 4.

    The layers mapped one by one, changed step by step; few heads then by a program (`megakv.fairkv.program`).

    Parameters
    ----------
    budgets : [layers][heads]
    limits : CopyLimits
        Checked against the number of heads.
    split : {"free", "even"}
    nodes : int
        Of the search in one layer.
    """
    size = limits.tp_size
    bound = sum(map(sum, budgets)) / size
    if not limits.most(len(budgets[0])):
        heads = np.array([[weight for row in budgets for weight in row]])
        one = Schemes(np.ones(heads.shape, dtype=np.int64), np.ones((1, size), dtype=np.int64))
        bound = float(lower_bounds(heads, one)[0])
    solutions, mappings = _layers(budgets, limits, split, nodes)
    least = [solution.bound for solution in solutions]
    largest = max(memory_of(mappings, budgets, size))
    for again in range(2):
        if split == "free" and limits.copies and largest > bound * (1 + CLOSE):
            # Where they can be as even as that, those that cost least time.
            shared = [_shared(mappings, budgets, limits, least, cap) for cap in (bound, None)]
            mappings = shared[0] or shared[1] or mappings
            largest = max(memory_of(mappings, budgets, size))
        if again or largest <= bound * (1 + CLOSE):
            break
        start = mappings
        for kick in range(KICKS):
            # Steps may end where none helps: then from there with one layer's ranks turned.
            at = kick * 7 % len(start)
            turned = [*start[:at], start[at].renumbered([*range(1, size), 0]), *start[at + 1 :]] if kick else start
            steps = _Steps(turned, budgets, size, bound, split)
            steps.repair(timed=False)
            if (reached := float(steps.loads.sum(axis=0).max())) < largest:
                mappings, largest = steps.mappings(), reached
            if largest <= bound * (1 + CLOSE):
                break
    if largest > bound * (1 + CLOSE):
        better, proven = program.solve(budgets, limits, split, least=least, cap=None, best=largest)
        bound = max(bound, proven)
        if better is not None and max(memory_of(better, budgets, size)) < largest:
            mappings, largest = better, max(memory_of(better, budgets, size))
    return TotalSolution(mappings, largest, min(largest, bound))


def map_layers(
    budgets: Weights,
    limits: CopyLimits,
    split: Split = "free",
    *,
    memory_cap: float | None = None,
    nodes: int = NODES,
) -> tuple[list[LayerMapping], float]:
    """Mappings of all layers whose slowest ranks, summed over layers, are fastest.

    Every layer is the best for itself; the cap is met by renumbering ranks, which costs no time, and only where that
    does not suffice by the changes that cost least, or for few heads in all by a program.

    Parameters
    ----------
    budgets : [layers][heads]
    limits : CopyLimits
        Checked against the number of heads.
    split : {"free", "even"}
    memory_cap : float, optional
        Tokens that a rank may keep, summed over its heads and all layers.
    nodes : int
        Of the search in one layer.

    Returns
    -------
    mappings : list of LayerMapping
    bound : float
        No mappings have a smaller sum over layers of the slowest rank.

    Raises
    ------
    ValueError
        If no mappings within the cap were found: names the cap and what is needed.
    """
    size = limits.tp_size
    solutions, mappings = _layers(budgets, limits, split, nodes)
    least = [solution.bound for solution in solutions]
    if memory_cap is None or max(memory_of(mappings, budgets, size)) <= memory_cap * (1 + CLOSE):
        return mappings, sum(least)
    repaired = _Steps(mappings, budgets, size, memory_cap, split)
    repaired.repair()
    # The other end: from the mappings that need least memory towards faster ones.
    total = least_total(budgets, limits, split, nodes=nodes)
    found = []
    for start in (mappings, repaired.mappings(), total.mappings):
        shared = _shared(start, budgets, limits, least, memory_cap) if split == "free" and limits.copies else None
        steps = _Steps(shared or start, budgets, size, memory_cap, split)
        if not steps.excess:
            steps.quicken()
            found.append(steps)
    best = min(found, key=lambda steps: steps.time, default=None)
    reached = inf if best is None else best.time
    better, bound = program.solve(budgets, limits, split, least=least, cap=memory_cap, best=reached)
    if better is None and best is None:
        check_cap(memory_cap, total, size)
    return better or (best.mappings() if best else total.mappings), bound


def check_cap(cap: float | None, least: TotalSolution, size: int) -> None:
    """Refuse a cap that even the mappings with the smallest largest total exceed.

    Raises
    ------
    ValueError
        Naming the cap, whether it is proven to be infeasible, and what is needed.
    """
    if cap is None or least.largest <= cap * (1 + CLOSE):
        return
    how = "is infeasible" if least.bound > cap * (1 + CLOSE) else "cannot be met by any mapping found"
    raise ValueError(
        f"memory_cap = {cap:g} tokens on each of {size} ranks {how}: the least that the fullest rank can keep is "
        f"{least.largest:.6g}; raise it to that or more, or use more ranks, more copies or smaller budgets"
    )
