"""Layers against each other: mappings within each rank's memory at the least price in time, and Equation 4.

The time of a layer stays the same when its ranks change places. So layers are first mapped each for itself, then turned
until the ranks hold equally much over all layers; only where a cap is tighter than that, heads move at a price in time.

The paper's Equation 4 makes the largest load of a rank, summed over all layers, as small as it can be. That is what a
rank's memory holds, not how long a token takes: ranks meet in every layer, not once per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from megakv.fairkv import program
from megakv.fairkv.assignment import NODES, TOLERANCE, Schemes, lower_bounds
from megakv.fairkv.fair_copying import CopyLimits, Split, map_layer
from megakv.fairkv.layer import LayerMapping

Weights = Sequence[Sequence[float]]

ROUNDS, STEPS = 2_000, 500
AT_ANY_PRICE = 1e6
PRICES = (0.1, 0.3, 1.0, 3.0, 10.0, AT_ANY_PRICE)
"""Of a token above the cap, in tokens of the slowest ranks: what is cheap is done first."""
KICKS = 8
CLOSE = 5e-7
"""Relative: totals that near to a cap or to a bound meet it. What a solver calls feasible is as close."""


@dataclass(frozen=True)
class TotalSolution:
    """Mappings of all layers, the largest total of a rank, and a bound that no mappings are below."""

    mappings: list[LayerMapping]
    largest: float
    bound: float


def level_ranks(loads: NDArray[np.float64]) -> NDArray[np.int64]:
    """``[layers, ranks]``: on which rank to put what is on each, so that the largest sum over layers is low."""
    layers, size = loads.shape
    orders, placed = np.zeros((layers, size), dtype=np.int64), np.zeros_like(loads)
    for layer in np.argsort(loads.min(axis=1) - loads.max(axis=1), kind="stable"):
        orders[layer, np.argsort(-loads[layer], kind="stable")] = np.argsort(placed.sum(axis=0), kind="stable")
        placed[layer, orders[layer]] = loads[layer]
    for _ in range(ROUNDS):
        # The exchange of two ranks in one layer that lowers the fullest most without another becoming as full.
        totals = placed.sum(axis=0)
        full = int(totals.argmax())
        change = placed[:, full : full + 1] - placed
        after = np.maximum(totals[full] - change, totals + change)
        after[:, full] = np.inf
        layer, other = map(int, np.unravel_index(int(after.argmin()), after.shape))
        if after[layer, other] >= totals[full] * (1 - TOLERANCE):
            break
        placed[layer, [full, other]] = placed[layer, [other, full]]
        first, second = orders[layer] == full, orders[layer] == other
        orders[layer, first], orders[layer, second] = other, full
    return orders


def arrange(mappings: Sequence[LayerMapping], budgets: Weights, tp_size: int) -> list[LayerMapping]:
    """The same mappings with ranks renumbered in each layer so that the ranks hold about equally much."""
    loads = np.array([m.loads(b, tp_size) for m, b in zip(mappings, budgets, strict=True)])
    return [m.renumbered(order.tolist()) for m, order in zip(mappings, level_ranks(loads), strict=True)]


def memory_of(mappings: Sequence[LayerMapping], budgets: Weights, tp_size: int) -> list[float]:
    """Tokens that each rank keeps, summed over heads and layers."""
    layers = [m.loads(b, tp_size) for m, b in zip(mappings, budgets, strict=True)]
    return [sum(column) for column in zip(*layers, strict=True)]


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
        """``[layers, ranks]``"""
        return self.tokens.sum(axis=1)

    @property
    def totals(self) -> NDArray[np.float64]:
        """``[ranks]``"""
        return self.tokens.sum(axis=(0, 1))

    def over(self, totals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens above the cap."""
        return np.where(totals > self.cap * (1 + CLOSE), totals - self.cap, 0.0)

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
        """``[layers, changes]``: tokens that each takes from each layer's `source` to `goal`; nan: impossible."""
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
            for part in (half, turned / 2, self.over(totals)[source, None], self.cap - totals[goal]):
                part = np.minimum(part + 0 * half, half)
                kinds.append(np.where(here & there & (part > 0), part, np.nan))
        found = np.concatenate(kinds, axis=1)
        found[source == goal] = np.nan
        return found

    def _apply(self, layer: int, change: int, source: int, goal: int, amount: float) -> None:
        tokens, held = self.tokens[layer], self.held[layer]
        heads = len(tokens)
        if change > heads * (heads + 1):
            tokens[(change - 1) % heads, [source, goal]] += [-amount, amount]
            return
        one, other = divmod(change - 1, heads + 1)
        moved = list(range(heads)) if not change else [one, other - 1] if other else [one]
        for array in (tokens, held):
            array[np.ix_(moved, [source, goal])] = array[np.ix_(moved, [goal, source])]

    def _step(self, price: float) -> bool:
        """Make the change that is worth most, a token above the cap counting as much as so many of time."""
        loads = self.loads
        totals, slowest = loads.sum(axis=0), loads.max(axis=1, keepdims=True)
        best, step = self.cap * TOLERANCE * max(price, 1.0), None
        # Off the slowest rank of each layer, or off a rank that is over the cap.
        full = np.flatnonzero(self.over(totals))
        for source in (loads.argmax(axis=1), *(np.full(len(loads), rank) for rank in full)):
            for goal in range(self.size):
                amount = self._changes(source, goal)
                rest = loads.copy()
                np.put_along_axis(rest, source[:, None], -inf, 1)
                rest[:, goal] = -inf
                left = np.take_along_axis(loads, source[:, None], 1) - amount
                reached = np.maximum(np.maximum(left, loads[:, goal, None] + amount), rest.max(axis=1, keepdims=True))
                before, after = totals[source, None], totals[goal] + amount
                excess = self.over(before) + self.over(totals[goal]) - self.over(before - amount) - self.over(after)
                worth = np.nan_to_num(slowest - reached + price * excess, nan=-inf)
                layer, change = map(int, np.unravel_index(int(worth.argmax()), worth.shape))
                if worth[layer, change] > best:
                    best = float(worth[layer, change])
                    step = layer, change, int(source[layer]), goal, float(amount[layer, change])
        if step is not None:
            self._apply(*step)
        return step is not None

    def improve(self, *prices: float) -> None:
        """Step by step towards the cap, at rising prices, and within it towards less time."""
        for price in prices:
            for _ in range(STEPS):
                if not self._step(price):
                    break


def _start(budgets: Weights, limits: CopyLimits, split: Split, nodes: int) -> tuple[list[float], list[LayerMapping]]:
    """Bounds of the layers, and the best mapping of each, with ranks renumbered so that they hold equally much."""
    solutions = [map_layer(row, limits, split, nodes=nodes) for row in budgets]
    mappings = arrange([solution.mapping for solution in solutions], budgets, limits.tp_size)
    return [solution.bound for solution in solutions], mappings


def _reshared(
    mappings: Sequence[LayerMapping],
    budgets: Weights,
    limits: CopyLimits,
    split: Split,
    least: Sequence[float],
    cap: float | None,
) -> list[LayerMapping] | None:
    """The same placements, shares chosen over all layers at once; None where they cannot be, or not within the cap."""
    if split != "free" or not limits.copies:
        return None
    return program.solve(budgets, limits, split, least=least, cap=cap, placed=mappings)[0]


def least_total(budgets: Weights, limits: CopyLimits, split: Split = "free", *, nodes: int = NODES) -> TotalSolution:
    """Mappings whose fullest rank, over all layers, has least: Equation 4.

    The layers mapped one by one, changed step by step; few heads then by a program (`megakv.fairkv.program`). `limits`
    are checked against the number of heads; `nodes` are of the search in one layer.
    """
    size = limits.tp_size
    bound = sum(map(sum, budgets)) / size
    if not limits.most(len(budgets[0])):
        heads = np.array([[weight for row in budgets for weight in row]])
        one = Schemes(np.ones(heads.shape, dtype=np.int64), np.ones((1, size), dtype=np.int64))
        bound = float(lower_bounds(heads, one)[0])
    enough = bound * (1 + CLOSE)
    least, mappings = _start(budgets, limits, split, nodes)
    largest = max(memory_of(mappings, budgets, size))
    for again in range(2):
        if largest > enough:
            # Where they can be as even as that, those that cost least time.
            shared = [_reshared(mappings, budgets, limits, split, least, cap) for cap in (bound, None)]
            mappings = shared[0] or shared[1] or mappings
            largest = max(memory_of(mappings, budgets, size))
        if again or largest <= enough:
            break
        start = mappings
        for kick in range(KICKS):
            # Steps may end where none helps: then from there with one layer's ranks turned.
            at = kick * 7 % len(start)
            turned = [*start[:at], start[at].renumbered([*range(1, size), 0]), *start[at + 1 :]] if kick else start
            steps = _Steps(turned, budgets, size, bound, split)
            steps.improve(AT_ANY_PRICE)
            if (reached := float(steps.totals.max())) < largest:
                mappings, largest = steps.mappings(), reached
            if largest <= enough:
                break
    if largest > enough:
        better, proven = program.solve(budgets, limits, split, least=least, cap=None, best=largest)
        bound = max(bound, proven)
        if better is not None and (reached := max(memory_of(better, budgets, size))) < largest:
            mappings, largest = better, reached
    return TotalSolution(mappings, largest, min(largest, bound))


def map_layers(
    budgets: Weights,
    limits: CopyLimits,
    split: Split = "free",
    *,
    memory_cap: float | None = None,
    nodes: int = NODES,
) -> tuple[list[LayerMapping], float]:
    """Mappings of all layers whose slowest ranks, summed over layers, are fastest, and a bound that no such sum is
    below.

    Every layer is the best for itself; a cap of tokens that a rank may keep, over its heads and all layers, is met by
    renumbering ranks, which costs no time, and only where that does not suffice by the changes that cost least, or for
    few heads in all by a program. A cap that no mappings found are within is a `ValueError`, which says what is needed.
    """
    size = limits.tp_size
    least, mappings = _start(budgets, limits, split, nodes)
    if memory_cap is None or max(memory_of(mappings, budgets, size)) <= memory_cap * (1 + CLOSE):
        return mappings, sum(least)
    repaired = _Steps(mappings, budgets, size, memory_cap, split)
    repaired.improve(*PRICES)
    # The other end: from the mappings that need least memory towards faster ones.
    total = least_total(budgets, limits, split, nodes=nodes)
    found = []
    for start in (mappings, repaired.mappings(), total.mappings):
        shared = _reshared(start, budgets, limits, split, least, memory_cap)
        steps = _Steps(shared or start, budgets, size, memory_cap, split)
        if not steps.over(steps.totals).any():
            steps.improve(AT_ANY_PRICE)
            found.append(steps)
    best = min(found, key=lambda steps: steps.time, default=None)
    reached = inf if best is None else best.time
    better, bound = program.solve(budgets, limits, split, least=least, cap=memory_cap, best=reached)
    if better is None and best is None:
        check_cap(memory_cap, total, size)
    return better or (best.mappings() if best else total.mappings), bound


def check_cap(cap: float | None, least: TotalSolution, size: int) -> None:
    """A `ValueError` for a cap that even the mappings with the smallest largest total exceed: says what is needed."""
    if cap is None or least.largest <= cap * (1 + CLOSE):
        return
    how = "is infeasible" if least.bound > cap * (1 + CLOSE) else "cannot be met by any mapping found"
    raise ValueError(
        f"memory_cap = {cap:g} tokens on each of {size} ranks {how}: the least that the fullest rank can keep is "
        f"{least.largest:.6g}; raise it to that or more, or use more ranks, more copies or smaller budgets"
    )
