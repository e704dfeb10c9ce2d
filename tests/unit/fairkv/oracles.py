"""What the mapper's searches are compared with: scipy's MILP, and the paper's Algorithms 1 and 2 as printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import numpy as np
from scipy.optimize import LinearConstraint, linprog, milp

from megakv.costmodel.head_times import LayerCosts
from megakv.fairkv.copy_limits import CopyLimits


class Program:
    """Rows of a mixed-integer program, by the names of their variables."""

    def __init__(self) -> None:
        self.index: dict[tuple, int] = {}
        self.integer: list[int] = []
        self.highest: list[float] = []
        self.rows: list[tuple[dict[tuple, float], float, float]] = []

    def variable(self, name: tuple, *, integer: bool = False, highest: float = 1.0) -> tuple:
        if name not in self.index:
            self.index[name] = len(self.index)
            self.integer.append(int(integer))
            self.highest.append(highest)
        return name

    def row(self, terms: dict[tuple, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.rows.append((terms, low, high))

    def solve(
        self, costs: dict[tuple, float], *, gap: float = 1e-9, seconds: float = 20, presolve: bool = True
    ) -> tuple[float, float] | None:
        """Value and proven bound; None if it is infeasible."""
        matrix = np.zeros((len(self.rows), len(self.index)))
        for number, (terms, _, _) in enumerate(self.rows):
            for name, value in terms.items():
                matrix[number, self.index[name]] += value
        objective = np.zeros(len(self.index))
        for name, value in costs.items():
            objective[self.index[name]] = value
        found = milp(
            objective,
            constraints=LinearConstraint(matrix, [r[1] for r in self.rows], [r[2] for r in self.rows]),
            integrality=np.array(self.integer),
            bounds=(0, np.array(self.highest)),
            options={"mip_rel_gap": gap, "time_limit": seconds, "presolve": presolve},
        )
        return None if found.x is None else (float(found.fun), float(found.mip_dual_bound))


def add_layer(program: Program, weights: Sequence[float], limits: CopyLimits, split: str, layer: int = 0) -> list[dict]:
    """A layer's heads on ranks, each rank with one head or more; returns the terms of every rank's load."""
    size, heads = limits.tp_size, range(len(weights))
    loads: list[dict] = [{} for _ in range(size)]
    for head in heads:
        for rank in range(size):
            here = program.variable(("x", layer, head, rank), integer=True)
            if not limits.copies:
                loads[rank][here] = weights[head]
            elif split == "free":
                share = program.variable(("y", layer, head, rank))
                program.row({share: 1, here: -1}, high=0)
                loads[rank][share] = weights[head]
            else:
                for count in range(1, limits.replicas + 1):
                    chosen = program.variable(("n", layer, head, count), integer=True)
                    part = program.variable(("u", layer, head, rank, count), integer=True)
                    program.row({part: 1, chosen: -1}, high=0)
                    loads[rank][part] = weights[head] / count
        held = {("x", layer, head, rank): 1.0 for rank in range(size)}
        program.row(held, low=1, high=limits.replicas)
        if not limits.copies:
            continue
        if split == "free":
            program.row({("y", layer, head, rank): 1.0 for rank in range(size)}, low=1, high=1)
        else:
            counts = range(1, limits.replicas + 1)
            program.row({("n", layer, head, count): 1.0 for count in counts}, low=1, high=1)
            for count in counts:
                parts = {("u", layer, head, rank, count): 1.0 for rank in range(size)}
                program.row({**parts, ("n", layer, head, count): -float(count)}, low=0, high=0)
            for rank in range(size):
                parts = {("u", layer, head, rank, count): 1.0 for count in counts}
                program.row({**parts, ("x", layer, head, rank): -1.0}, low=0, high=0)
    for rank in range(size):
        program.row({("x", layer, head, rank): 1.0 for head in heads}, low=1)
    program.row(
        {("x", layer, head, rank): 1.0 for head in heads for rank in range(size)}, high=len(weights) + limits.copies
    )
    return loads


def best_layer(
    weights: Sequence[float], limits: CopyLimits, split: str = "free", *, reached: float = np.inf
) -> tuple[float, float]:
    """The slowest rank's load in the optimum of one layer, and the bound that the solver proved.

    About once in 1,500 programs HiGHS loses the optimum (it prints that a solver within it failed) and proves a bound
    above a load that somebody has `reached`; without its presolve it does not.
    """
    program = Program()
    slowest = program.variable(("t",), highest=np.inf)
    for load in add_layer(program, weights, limits, split):
        program.row({**load, slowest: -1.0}, high=0)
    found = program.solve({slowest: 1.0})
    if found is not None and found[1] * (1 - 1e-6) > reached:
        found = program.solve({slowest: 1.0}, presolve=False)
    assert found is not None
    return found


def best_seconds(costs: LayerCosts, shared_s: float, kept: Sequence[float], limits: CopyLimits) -> tuple[float, float]:
    """A layer's seconds in the optimum, if copies cost `shared_s` together, and the bound that the solver proved."""
    program, heads = Program(), range(len(kept))
    # In units of a rank's mean, so that the solver's tolerances mean the same everywhere.
    fixed, unit = costs.head_s / costs.token_s, sum(kept) / limits.tp_size + costs.head_s / costs.token_s
    slowest, shared = program.variable(("t",), highest=np.inf), program.variable(("z",), integer=True)
    loads = add_layer(program, [tokens / unit for tokens in kept], limits, "free")
    held: list[dict] = [{("x", 0, head, rank): 1.0 for head in heads} for rank in range(limits.tp_size)]
    for rank, load in enumerate(loads):
        terms = dict(load)
        for name in held[rank]:
            terms[name] = terms.get(name, 0.0) + fixed / unit
        program.row({**terms, slowest: -1.0}, high=0)
    everywhere = {name: 1.0 for names in held for name in names}
    program.row({**everywhere, shared: -float(max(1, limits.copies))}, high=len(kept))
    late = (1 + costs.jitter) / limits.tp_size
    program.row({**{name: late * fixed / unit for name in everywhere}, slowest: -1.0}, high=-late * sum(kept) / unit)
    scale = unit * costs.token_s
    found = program.solve({slowest: 1.0, shared: shared_s / scale}, gap=1e-4, seconds=5)
    assert found is not None
    value, bound = (max(costs.least_s, costs.alike_s + part * scale) for part in found)
    return value, bound


def best_layers(
    budgets: Sequence[Sequence[float]], limits: CopyLimits, *, cap: float | None = None, totals: bool = False
) -> tuple[float, float] | None:
    """All layers together: the sum of their slowest ranks under a cap of memory, or the largest total of a rank."""
    program = Program()
    sums: list[dict] = [{} for _ in range(limits.tp_size)]
    for layer, weights in enumerate(budgets):
        slowest = program.variable(("t", layer), highest=np.inf)
        for rank, load in enumerate(add_layer(program, weights, limits, "free", layer)):
            program.row({**load, slowest: -1.0}, high=0)
            sums[rank].update(load)
    largest = program.variable(("m",), highest=np.inf)
    for total in sums:
        program.row({**total, largest: -1.0}, high=0)
        if cap is not None:
            program.row(total, high=cap)
    costs = {largest: 1.0} if totals else {("t", layer): 1.0 for layer in range(len(budgets))}
    return program.solve(costs)


def best_split(weights: Sequence[float], ranks: Sequence[Sequence[int]], size: int) -> float:
    """The slowest rank's load of a fixed placement, by linear programming."""
    edges = [(head, rank) for head, held in enumerate(ranks) for rank in held]
    costs = np.zeros(len(edges) + 1)
    costs[-1] = 1
    upper = np.zeros((size, len(edges) + 1))
    equal = np.zeros((len(weights), len(edges) + 1))
    upper[:, -1] = -1
    for column, (head, rank) in enumerate(edges):
        upper[rank, column] = 1
        equal[head, column] = 1
    return float(linprog(costs, A_ub=upper, b_ub=np.zeros(size), A_eq=equal, b_eq=np.asarray(weights)).fun)


def printed_schemes(heads: int, most: int) -> Iterator[list[int]]:
    """Algorithm 1: for each head one or more copies, depth first; `most` bounds the extra ones, as its text says."""

    def backtrack(index: int, scheme: list[int]) -> Iterator[list[int]]:
        if index == heads:
            yield list(scheme)
            return
        for copies in range(1, most - (len(scheme) - index) + 2):
            yield from backtrack(index + 1, scheme + [index] * copies)

    yield from backtrack(0, [])


def printed_selection(weights: Sequence[float], most: int, size: int) -> tuple[float, float, float]:
    """Algorithm 2 over everything: the slowest rank where max - min is least, the fastest slowest rank of all, and the
    least max - min.
    """
    spread, chosen, fastest = float("inf"), float("inf"), float("inf")
    for scheme in printed_schemes(len(weights), most):
        if len(scheme) < size:
            continue
        counts = [scheme.count(head) for head in range(len(weights))]
        places = [list(combinations(range(size), count)) for count in counts if count <= size]
        if len(places) < len(weights):
            continue
        for placing in product(*places):
            if len(set().union(*placing)) < size:
                continue
            loads = [0.0] * size
            for weight, held in zip(weights, placing, strict=True):
                for rank in held:
                    loads[rank] += weight / len(held)
            fastest = min(fastest, max(loads))
            if max(loads) - min(loads) < spread - 1e-12:
                spread, chosen = max(loads) - min(loads), max(loads)
    return chosen, fastest, spread
