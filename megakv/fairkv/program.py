"""The mapper as a mixed-integer program, for HiGHS: memory caps and the paper's Equation 4."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megakv.cache.layer import LayerMapping
from megakv.fairkv.copy_limits import CopyLimits

MOST_BINARIES = 1_000
"""Above, the solver finds nothing in its time."""
SECONDS = 10.0
"""For one program."""
EXACT = 50
"""Binaries up to which a program is solved to its end."""
GAP, NODES = 1e-7, 20_000
"""Between what is found and what is proven, relative, and of the search, at which it ends on every machine alike."""
COARSE_GAP, COARSE_NODES = 1e-4, 2_000
"""The same of larger programs."""
INFEASIBLE = 2
"""Of the solver's states."""

Columns = NDArray[np.int64]


class _Program:
    """Variables by number, and rows that hold sums of them between two bounds."""

    def __init__(self) -> None:
        self.number = 0
        self.bounds: list[NDArray[np.float64]] = []
        self.limits: list[tuple[float, float]] = []
        self.entries: list[NDArray[np.float64]] = []

    def columns(self, *shape: int, low: ArrayLike = 0.0, high: ArrayLike = 1.0, whole: bool = False) -> Columns:
        """New variables."""
        first, self.number = self.number, self.number + prod(shape)
        self.bounds.append(np.stack([np.broadcast_to(part, shape).ravel() for part in (low, high, whole)]))
        return np.arange(first, self.number).reshape(shape)

    def row(self, columns: Columns, factors: ArrayLike = 1.0, low: float = -inf, high: float = inf) -> None:
        """One row for each of ``[rows, terms]``."""
        number = np.broadcast_to(np.arange(len(columns))[:, None] + len(self.limits), columns.shape)
        terms = np.stack([number, columns, np.broadcast_to(factors, columns.shape)], axis=-1)
        self.entries.append(terms.reshape(-1, 3))
        self.limits += [(low, high)] * len(columns)

    def solve(self, objective: Columns, gap: float, nodes: int) -> tuple[NDArray[np.float64] | None, float]:
        """Values of all variables, or None, and the proven bound of the objective's sum; infinite if infeasible."""
        from scipy.optimize import LinearConstraint, milp
        from scipy.sparse import coo_array

        number, column, value = np.concatenate(self.entries).T
        place = number.astype(np.int64), column.astype(np.int64)
        matrix = coo_array((value, place), shape=(len(self.limits), self.number)).tocsr()
        costs = np.zeros(self.number)
        costs[objective] = 1.0
        low, high, whole = np.concatenate(self.bounds, axis=1)
        found = milp(
            costs,
            constraints=LinearConstraint(matrix, *zip(*self.limits, strict=True)),
            integrality=whole,
            bounds=(low, high),
            options={"mip_rel_gap": gap, "time_limit": SECONDS, "node_limit": nodes},
        )
        if found.status == INFEASIBLE:
            return None, inf
        return found.x, -inf if found.mip_dual_bound is None else float(found.mip_dual_bound)


def solve(
    budgets: Sequence[Sequence[float]],
    limits: CopyLimits,
    split: str,
    *,
    least: Sequence[float],
    cap: float | None = None,
    best: float = inf,
    placed: Sequence[LayerMapping] | None = None,
) -> tuple[list[LayerMapping] | None, float]:
    """Mappings of all layers, together the best, and a bound that no mappings are below; infinite if none are within
    the cap.

    With a `cap` of tokens that a rank may keep over all layers, the sum over layers of the slowest rank is minimised,
    which `least` bounds for each layer from below; without one, the largest total of a rank. Only mappings better than
    `best` count: None if there are none, or none were found in time. Where mappings are `placed`, only the shares of
    their replicas are chosen, if the split is "free": a linear program.
    """
    weights, size, copies = np.array(budgets, dtype=np.float64), limits.tp_size, limits.copies
    layers, heads = weights.shape
    free = split == "free" and copies > 0
    counts = np.arange(1, 2 if free else limits.replicas + 1)
    mean = weights.sum() / size
    start = sum(least) if cap is not None else mean
    binaries = weights.size * size * len(counts)
    gap, nodes = (GAP, NODES) if placed is not None or binaries <= EXACT else (COARSE_GAP, COARSE_NODES)
    if not mean or best <= start * (1 + gap) or (binaries > MOST_BINARIES if placed is None else not free):
        return None, start
    weights = weights / mean
    program = _Program()
    low: ArrayLike = 0.0
    high: ArrayLike = 1.0
    if placed is not None:
        low = high = np.array([[[[r in held for r in range(size)]] for held in layer.ranks] for layer in placed])
    # Whether a rank holds one of so many replicas of a head.
    held_LHNR = program.columns(layers, heads, len(counts), size, low=low, high=high, whole=placed is None)
    by_head, by_rank = held_LHNR.reshape(layers * heads, -1), held_LHNR.transpose(0, 3, 1, 2)
    program.row(by_head, low=1, high=limits.replicas)
    program.row(held_LHNR.reshape(layers, -1), high=heads + copies)
    program.row(by_rank.reshape(layers * size, -1), low=1)
    if free:
        # What part of a head's tokens a rank has.
        shares_LHR = program.columns(layers, heads, size)
        program.row(np.stack([shares_LHR, held_LHNR[:, :, 0]], axis=-1).reshape(-1, 2), [1, -1], high=0)
        program.row(shares_LHR.reshape(-1, size), low=1, high=1)
        loads, factors = shares_LHR.transpose(0, 2, 1), weights
    else:
        loads, factors = by_rank.reshape(layers, size, -1), (weights[..., None] / counts).reshape(layers, -1)
    if len(counts) > 1:
        chosen = program.columns(layers, heads, len(counts), whole=True)
        program.row(chosen.reshape(-1, len(counts)), low=1, high=1)
        for index, count in enumerate(counts):
            of_count = np.concatenate([held_LHNR[:, :, index], chosen[:, :, index, None]], axis=-1)
            program.row(of_count.reshape(-1, size + 1), [1] * size + [-count], 0, 0)
    if limits.copied_heads is not None and copies:
        copied = program.columns(layers, heads, whole=True)
        with_copied = np.concatenate([by_head, copied.reshape(-1, 1)], axis=1)
        program.row(with_copied, [1] * by_head.shape[1] + [1 - limits.replicas], high=1)
        program.row(copied, high=limits.copied_heads)
    totals = loads.transpose(1, 0, 2).reshape(size, -1)
    if cap is None:
        objective = program.columns(1, low=1.0, high=best / mean)
        with_largest = np.concatenate([totals, np.repeat(objective[None], size, axis=0)], axis=1)
        program.row(with_largest, np.append(factors.ravel(), -1), high=0)
    else:
        objective = program.columns(layers, low=np.array(least) / mean, high=inf)
        for slowest, of_layer, factor in zip(objective, loads, factors, strict=True):
            program.row(np.insert(of_layer, 0, slowest, axis=1), np.insert(factor, 0, -1.0), high=0)
        program.row(objective[None], high=best / mean)
        program.row(totals, factors.ravel(), high=cap / mean)
    values, bound = program.solve(objective, gap, nodes)
    bound *= mean
    if values is None:
        # None better: what has been found is the best.
        return None, max(start, min(best, bound))
    parts = values[shares_LHR] if free else (values[held_LHNR] / counts[:, None]).sum(axis=2)
    held = np.any(values[held_LHNR] > 0.5, axis=2)
    mappings = [LayerMapping.of_arrays(*layer) for layer in zip(held, parts, strict=True)]
    return mappings, max(start, min(bound, best))
