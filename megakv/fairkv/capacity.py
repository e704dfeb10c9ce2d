"""Layers against each other: mappings within each rank's memory at the least price in time, and Equation 4.

The time of a layer stays the same when its ranks change places. So layers are first mapped each for itself, then
renumbered until the ranks hold equally much over all layers; only where that does not suffice heads move.

The paper's Equation 4 makes the largest load of a rank, summed over all layers, as small as it can be. That is what a
rank's memory holds, not how long a token takes: ranks meet in every layer, not once per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from megakv.cache.layer import LayerMapping
from megakv.cache.splitting import TOLERANCE
from megakv.fairkv import program
from megakv.fairkv.assignment import Criterion, Schemes, lower_bounds
from megakv.fairkv.copy_limits import CopyLimits
from megakv.fairkv.fair_copying import Split, map_layer

Weights = Sequence[Sequence[float]]

SWEEPS, TRIALS, SHUFFLED = 50, 200, 3
"""Over all layers until nothing changes; from so many other starts; each with so many layers shuffled."""
PRICES, STEPS = (0.3, 1.0, 3.0, 10.0, 1e6), 500
"""Of a token above the cap, in tokens of the slowest ranks: what is cheap is done first; and changes at each."""
KICKS = 6
CLOSE = 5e-7
"""Relative: totals that near to a cap or to a bound meet it. What a solver calls feasible is as close."""
EVEN = 5e-5
"""Relative: ranks that hold so much alike hold equally much."""


@dataclass(frozen=True)
class TotalSolution:
    """Mappings of all layers, the largest total of a rank, and a bound that no mappings are below."""

    mappings: list[LayerMapping]
    largest: float
    bound: float


def loads_of(mappings: Sequence[LayerMapping], budgets: Weights, tp_size: int) -> NDArray[np.float64]:
    """``[layers, ranks]``"""
    return np.array([m.loads(b, tp_size) for m, b in zip(mappings, budgets, strict=True)])


def memory_of(mappings: Sequence[LayerMapping], budgets: Weights, tp_size: int) -> list[float]:
    """Tokens that each rank keeps, summed over heads and layers."""
    total: list[float] = loads_of(mappings, budgets, tp_size).sum(axis=0).tolist()
    return total


def level_ranks(loads: NDArray[np.float64], enough: float = inf) -> NDArray[np.int64]:
    """``[layers, ranks]``: on which rank to put what is on each, so that the largest sum over layers is low.

    One layer after the other puts its most where the others have least, until none changes; then again with some
    layers shuffled, until no sum is above `enough`.
    """
    random, (layers, size) = np.random.default_rng(0), loads.shape
    uneven_first = np.argsort(loads.min(axis=1) - loads.max(axis=1), kind="stable")
    largest_first = -np.sort(-loads, axis=1)
    best, found = inf, np.zeros(loads.shape)
    for _ in range(1 + TRIALS):
        placed = found.copy()
        for layer in random.choice(layers, min(SHUFFLED, layers), replace=False):
            placed[layer] = random.permutation(placed[layer])
        for _ in range(SWEEPS):
            before = placed.copy()
            for layer in uneven_first:
                placed[layer] = 0.0
                placed[layer, np.argsort(placed.sum(axis=0), kind="stable")] = largest_first[layer]
            if (placed == before).all():
                break
        if (largest := float(placed.sum(axis=0).max())) < best:
            best, found = largest, placed
        if best <= enough or size == 1:
            break
    orders = np.zeros(loads.shape, dtype=np.int64)
    np.put_along_axis(orders, np.argsort(loads, axis=1), np.argsort(found, axis=1), axis=1)
    return orders


def arrange(
    mappings: Sequence[LayerMapping], budgets: Weights, tp_size: int, enough: float = inf
) -> list[LayerMapping]:
    """The same mappings with ranks renumbered in each layer so that they hold about equally much, or `enough`."""
    orders = level_ranks(loads_of(mappings, budgets, tp_size), enough)
    return [m.renumbered(order.tolist()) for m, order in zip(mappings, orders, strict=True)]


def _start(
    budgets: Weights, limits: CopyLimits, split: Split, enough: float, criterion: Criterion = "slowest"
) -> tuple[list[float], list[LayerMapping]]:
    """Bounds of the layers, and the best mapping of each, with ranks renumbered so that they hold equally much."""
    solutions = [map_layer(row, limits, split, criterion=criterion) for row in budgets]
    mappings = arrange([solution.mapping for solution in solutions], budgets, limits.tp_size, enough)
    return [solution.bound for solution in solutions], mappings


def relieved(mappings: list[LayerMapping], budgets: Weights, tp_size: int, cap: float) -> list[LayerMapping]:
    """Heads moved off the fullest rank, then ranks renumbered, until it is within the cap, or as near as that comes."""
    largest = max(memory_of(mappings, budgets, tp_size))
    for kick in range(KICKS):
        if largest <= cap:
            break
        start, at = list(mappings), kick * 7 % len(mappings)
        if kick:
            # Steps may end where none helps: then from there with one layer's ranks turned.
            start[at] = start[at].renumbered([*range(1, tp_size), 0])
        changed = arrange(_relieve(start, budgets, tp_size, cap), budgets, tp_size, cap)
        reached = max(memory_of(changed, budgets, tp_size))
        if reached < largest:
            mappings, largest = changed, reached
    return mappings


def _relieve(mappings: Sequence[LayerMapping], budgets: Weights, tp_size: int, cap: float) -> list[LayerMapping]:
    """Heads moved, or exchanged, off the fullest rank: first those that cost least time."""
    tokens = np.zeros((len(budgets), len(budgets[0]), tp_size))
    held = np.zeros(tokens.shape, dtype=bool)
    for layer, (mapping, row) in enumerate(zip(mappings, budgets, strict=True)):
        for head, (at, shares) in enumerate(zip(mapping.ranks, mapping.shares, strict=True)):
            held[layer, head, at], tokens[layer, head, at] = True, np.array(shares) * row[head]
    for price in PRICES:
        for _ in range(STEPS):
            step = _relief(tokens, held, cap, price)
            if step is None:
                break
            layer, heads, ranks = step
            for array in (tokens[layer], held[layer]):
                array[np.ix_(heads, ranks)] = array[np.ix_(heads, ranks[::-1])]
    return [LayerMapping.of_arrays(*layer) for layer in zip(held, tokens, strict=True)]


def _relief(
    tokens: NDArray[np.float64], held: NDArray[np.bool_], cap: float, price: float
) -> tuple[int, list[int], list[int]] | None:
    """The layer, heads and two ranks of the change that is worth most: its relief at a price, less what it slows."""
    loads = tokens.sum(axis=1)
    totals, slowest = loads.sum(axis=0), loads.max(axis=1)
    full = int(totals.argmax())
    best, step = cap * TOLERANCE * price, None
    for goal in range(len(totals)) if totals[full] > cap else ():
        mine = np.where(held[..., full] & ~held[..., goal], tokens[..., full], np.nan)
        theirs = np.where(held[..., goal] & ~held[..., full], tokens[..., goal], np.nan)
        # [layers, heads, 1 + heads]: each head alone, or for another one; a rank keeps one head of each layer.
        amount = mine[:, :, None] - np.pad(theirs, ((0, 0), (1, 0)))[:, None]
        amount[held[..., full].sum(axis=1) == 1, :, 0] = np.nan
        rest = np.delete(loads, [full, goal], axis=1).max(axis=1, initial=0.0)[:, None, None]
        pair = np.maximum(loads[:, full, None, None] - amount, loads[:, goal, None, None] + amount)
        slower = np.maximum(pair, rest) - slowest[:, None, None]
        relief = totals[full] - np.maximum(np.maximum(totals[full] - amount, totals[goal] + amount), cap)
        worth = np.nan_to_num(price * relief - slower, nan=-inf)
        layer, head, other = map(int, np.unravel_index(int(worth.argmax()), worth.shape))
        if worth[layer, head, other] > best:
            best = float(worth[layer, head, other])
            step = layer, [head, other - 1] if other else [head], [full, goal]
    return step


def least_total(budgets: Weights, limits: CopyLimits, split: Split = "free") -> TotalSolution:
    """Mappings whose fullest rank, over all layers, has least: Equation 4.

    The layers mapped one by one; few heads then by a program (`megakv.fairkv.program`). `limits` are checked against
    the number of heads.
    """
    size = limits.tp_size
    bound = sum(map(sum, budgets)) / size
    if not limits.most(len(budgets[0])):
        heads = np.array([[weight for row in budgets for weight in row]])
        one = Schemes(np.ones(heads.shape, dtype=np.int64), np.ones((1, size), dtype=np.int64))
        bound = float(lower_bounds(heads, one)[0])
    least, mappings = _start(budgets, limits, split, bound * (1 + EVEN))
    if len(budgets) == 1:
        bound = max(bound, least[0])
    largest = max(memory_of(mappings, budgets, size))
    solve = partial(program.solve, budgets, limits, split, least=least)
    for again in (False, True):
        if largest > bound * (1 + CLOSE):
            start = relieved(mappings, budgets, size, bound * (1 + EVEN)) if again else mappings
            # Where replicas can be shared as evenly as that, in the way that costs least time.
            start = solve(cap=bound, placed=start)[0] or solve(placed=start)[0] or start
            if (reached := max(memory_of(start, budgets, size))) < largest:
                mappings, largest = start, reached
    if largest > bound * (1 + CLOSE):
        better, proven = solve(best=largest)
        bound = max(bound, proven)
        if better is not None and (reached := max(memory_of(better, budgets, size))) < largest:
            mappings, largest = better, reached
    return TotalSolution(mappings, largest, min(largest, bound))


def level_layers(budgets: Weights, limits: CopyLimits) -> tuple[list[LayerMapping], float]:
    """Mappings by Algorithm 2: in every layer the smallest difference between the fullest rank and the emptiest,
    replicas sharing a head equally; and a bound that no sum of such differences is below.
    """
    least, mappings = _start(budgets, limits, "even", inf, "difference")
    return mappings, sum(least)


def map_layers(
    budgets: Weights, limits: CopyLimits, split: Split = "free", *, memory_cap: float | None = None
) -> tuple[list[LayerMapping], float]:
    """Mappings of all layers whose slowest ranks, summed over layers, are fastest, and a bound that no such sum is
    below.

    Every layer is the best for itself; a cap of tokens that a rank may keep, over its heads and all layers, is met by
    renumbering ranks, which costs no time, and only where that does not suffice by a program. A cap that no mappings
    found are within is a `ValueError`, which says what is needed.
    """
    size, cap = limits.tp_size, inf if memory_cap is None else memory_cap * (1 + CLOSE)
    least, mappings = _start(budgets, limits, split, cap)
    if memory_cap is None or max(memory_of(mappings, budgets, size)) <= cap:
        return mappings, sum(least)
    solve = partial(program.solve, budgets, limits, split, least=least, cap=memory_cap)
    found, _ = solve(placed=mappings)
    if found is None:
        found = relieved(mappings, budgets, size, cap)
        if max(memory_of(found, budgets, size)) > cap:
            found, _ = solve(placed=found)
    reached = inf if found is None else float(loads_of(found, budgets, size).max(axis=1).sum())
    better, bound = solve(best=reached)
    found = better or found
    if found is None:
        total = least_total(budgets, limits, split)
        check_cap(memory_cap, total, size)
        found = total.mappings
    return found, bound


def check_cap(cap: float | None, least: TotalSolution, size: int) -> None:
    """A `ValueError` for a cap that even the mappings with the smallest largest total exceed: says what is needed."""
    if cap is None or least.largest <= cap * (1 + CLOSE):
        return
    how = "is infeasible" if least.bound > cap * (1 + CLOSE) else "cannot be met by any mapping found"
    raise ValueError(
        f"memory_cap = {cap:g} tokens on each of {size} ranks {how}: the least that the fullest rank can keep is "
        f"{least.largest:.6g}; raise it to that or more, or use more ranks, more copies or smaller budgets"
    )
