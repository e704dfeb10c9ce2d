"""The mapper as a mixed-integer program, for HiGHS: memory caps and the paper's Equation 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from megakv.fairkv.layer import LayerMapping
from megakv.fairkv.limits import CopyLimits

MOST_BINARIES = 1_000
"""Above, the solver finds nothing in its time that smaller steps have not found."""
SECONDS, NODES = 2.0, 20_000
"""For one program; the nodes end it at the same place on every machine that is not slow."""
EXACT, GAP = 150, (1e-7, 1e-4)
"""Up to so many binary variables the first gap between what is found and what is proven ends it, then the second."""
INFEASIBLE = 2
"""Of the solver's states."""


@dataclass
class _Columns:
    """Variables and rows of a program, by number."""

    lowest: list[float] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def add(self, low: float = 0.0, high: float = 1.0, *, whole: bool = False) -> int:
        self.lowest.append(low)
        self.highest.append(high)
        self.whole.append(whole)
        return len(self.whole) - 1

    def row(self, terms: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.rows.append((terms, low, high))


def solve(
    budgets: Sequence[Sequence[float]],
    limits: CopyLimits,
    split: str,
    *,
    least: Sequence[float],
    cap: float | None,
    best: float = np.inf,
    placed: Sequence[LayerMapping] | None = None,
) -> tuple[list[LayerMapping] | None, float]:
    """Mappings of all layers, together the best.

    Parameters
    ----------
    budgets : [layers][heads]
    limits : CopyLimits
    split : {"free", "even"}
    least : sequence of float
        For each layer a load that its slowest rank cannot be below.
    cap : float or None
        Tokens that a rank may keep over all layers; what is minimised then is the sum over layers of the slowest rank.
        None: minimise the largest total of a rank.
    best : float
        What has been found: only better mappings count.
    placed : sequence of LayerMapping, optional
        Only the shares of these mappings' replicas are chosen, for the split "free": a linear program.

    Returns
    -------
    mappings : list of LayerMapping or None
        None if there are none better, or none were found in time.
    bound : float
        No mappings are below it; infinite if none are within the cap.
    """
    size, heads = limits.tp_size, len(budgets[0])
    free = split == "free" and limits.copies > 0
    counts = range(1, 2 if free or not limits.copies else limits.replicas + 1)
    binaries = len(budgets) * heads * size * len(counts)
    mean = sum(map(sum, budgets)) / size
    start = sum(least) if cap is not None else mean
    gap = GAP[0] if placed is not None or binaries <= EXACT else GAP[1]
    if not mean or best <= start * (1 + gap) or placed is None and binaries > MOST_BINARIES:
        return None, start
    columns = _Columns()
    held: dict[tuple[int, int, int, int], int] = {}
    loads: list[list[dict[int, float]]] = [[{} for _ in range(size)] for _ in budgets]
    tokens: dict[tuple[int, int, int], int] = {}
    for layer, row in enumerate(budgets):
        copied = []
        for head, budget in enumerate(row):
            chosen = [columns.add(whole=True) for _ in counts] if len(counts) > 1 else []
            for count, rank in product(counts, range(size)):
                fixed = None if placed is None else float(rank in placed[layer].ranks[head])
                low, high = (0.0, 1.0) if fixed is None else (fixed, fixed)
                held[layer, head, count, rank] = here = columns.add(low, high, whole=placed is None)
                if free:
                    tokens[layer, head, rank] = part = columns.add()
                    columns.row({part: 1, here: -1}, high=0)
                    loads[layer][rank][part] = budget / mean
                else:
                    loads[layer][rank][here] = budget / mean / count
            mine = {held[layer, head, count, rank]: 1.0 for count, rank in product(counts, range(size))}
            columns.row(mine, 1, limits.replicas if limits.copies else 1)
            if free:
                columns.row({tokens[layer, head, rank]: 1.0 for rank in range(size)}, 1, 1)
            for count, choice in zip(counts, chosen, strict=False):
                columns.row({**{held[layer, head, count, r]: 1.0 for r in range(size)}, choice: -float(count)}, 0, 0)
            if chosen:
                columns.row(dict.fromkeys(chosen, 1.0), 1, 1)
            if limits.copied_heads is not None and limits.copies:
                copied.append(columns.add(whole=True))
                columns.row({**mine, copied[-1]: 1.0 - limits.replicas}, high=1)
        replicas = {column: 1.0 for (at, *_), column in held.items() if at == layer}
        columns.row(replicas, high=heads + limits.copies)
        columns.row(dict.fromkeys(copied, 1.0), high=np.inf if limits.copied_heads is None else limits.copied_heads)
        for rank in range(size):
            columns.row({held[layer, head, n, rank]: 1.0 for head in range(heads) for n in counts}, low=1)
    if cap is None:
        objective = [columns.add(1.0, best / mean)]
    else:
        objective = [columns.add(low / mean, np.inf) for low in least]
        columns.row(dict.fromkeys(objective, 1.0), high=best / mean)
    for rank in range(size):
        total = {column: value for by_rank in loads for column, value in by_rank[rank].items()}
        columns.row({**total, objective[0]: -1.0} if cap is None else total, high=0 if cap is None else cap / mean)
        for slowest, by_rank in zip(objective if cap is not None else [], loads, strict=False):
            columns.row({**by_rank[rank], slowest: -1.0}, high=0)
    values, bound = _solved(columns, objective, gap)
    bound *= mean
    if values is None:
        # None better: what has been found is the best.
        return None, max(start, min(best, bound))
    mappings = []
    for layer in range(len(budgets)):
        parts: list[dict[int, float]] = [{} for _ in range(heads)]
        for (at, head, count, rank), column in held.items():
            if at == layer and values[column] > 0.5:
                parts[head][rank] = float(values[tokens[at, head, rank]]) if free else 1 / count
        mapping = LayerMapping.of(parts)
        mappings.append(mapping.with_shares(mapping.shares))
    return mappings, max(start, min(bound, best))


def _solved(columns: _Columns, objective: list[int], gap: float) -> tuple[np.ndarray | None, float]:
    """Values of all columns, or None, and the proven bound of the sum of the objective's; infinite if infeasible."""
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import coo_array

    rows = [row for row in columns.rows if row[0]]
    entries = [(at, column, value) for at, row in enumerate(rows) for column, value in row[0].items()]
    number, column, value = zip(*entries, strict=True)
    costs = np.zeros(len(columns.whole))
    costs[objective] = 1.0
    found = milp(
        costs,
        constraints=LinearConstraint(
            coo_array((value, (number, column)), shape=(len(rows), len(costs))).tocsr(),
            [low for _, low, _ in rows],
            [high for _, _, high in rows],
        ),
        integrality=np.array(columns.whole, dtype=int),
        bounds=(np.array(columns.lowest), np.array(columns.highest)),
        options={"mip_rel_gap": gap, "time_limit": SECONDS, "node_limit": NODES},
    )
    if found.status == INFEASIBLE:
        return None, np.inf
    return found.x, -np.inf if found.mip_dual_bound is None else float(found.mip_dual_bound)
