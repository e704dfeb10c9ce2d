"""How replicas share the heads that they hold: decided anew for every request, on a placement that stays.

The best split of one layer is a flow from heads to the ranks that hold them, with the least capacity per rank at which
all of it passes. By Hall's condition that is the largest, over sets of ranks, of the budget of the heads that lie on
these ranks alone over the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megakv.cache.layer import LayerMapping

TOLERANCE = 1e-9
"""Relative difference below which two loads are equal."""
MOST_SETS = 1 << 12
"""Sets of ranks that `slowest_loads` looks at; beyond, the flow itself is faster."""


def split_heads(
    weights: Sequence[float],
    ranks: Sequence[Sequence[int]],
    tp_size: int,
    *,
    whole: bool = False,
    fixed: float = 0.0,
) -> tuple[float, list[list[float]]]:
    """The split of one layer whose slowest rank is fastest: the load of that rank, and the parts.

    ``ranks[head]`` hold a head of so much weight; ``parts[head]``, along with them, are the tokens that each attends
    to. Where budgets are `whole` numbers of tokens they stay so when divided, and the slowest rank's load is rounded
    up. Every head that a rank holds counts there as `fixed` tokens more.
    """
    if fixed:
        # What nobody can take from a rank is a head of that rank alone.
        counts = [sum(rank in held for held in ranks) for rank in range(tp_size)]
        alone = [[rank] for rank in range(tp_size)]
        slowest, parts = split_heads([*weights, *(fixed * n for n in counts)], [*ranks, *alone], tp_size, whole=whole)
        return slowest, parts[: len(weights)]
    total = sum(weights)
    slack = 0 if whole else total * TOLERANCE * 1e-3
    flow: list[dict[int, float]] = [dict.fromkeys(held, 0) for held in ranks]
    load: list[float] = [0] * tp_size

    def shared(value: float, count: int) -> float:
        return -(-value // count) if whole else value / count

    def put(head: int, rank: int, amount: float) -> float:
        flow[head][rank] += amount
        load[rank] += amount
        return amount

    def send(head: int, amount: float, asked: set[int]) -> float:
        """Put an amount of a head on its ranks, where others' parts give way if they can; returns what is left."""
        held = sorted((rank for rank in ranks[head] if rank not in asked), key=load.__getitem__)
        for rank in held:
            amount -= put(head, rank, max(0, min(amount, capacity - load[rank])))
        for rank in held:
            if amount <= slack or rank in asked:
                continue
            asked.add(rank)
            for other, parts in enumerate(flow):
                if other != head and (part := min(amount, parts.get(rank, 0))) > slack:
                    gone = part - send(other, part, asked)
                    put(other, rank, -gone)
                    amount -= put(head, rank, gone)
        return amount

    capacity = shared(total, tp_size)
    for head in sorted(range(len(weights)), key=lambda h: len(ranks[h])):
        while (left := weights[head] - sum(flow[head].values())) > slack:
            full: set[int] = set()
            if left - send(head, left, full) <= slack:
                # The heads that are on full ranks alone need more.
                raised = shared(sum(w for w, r in zip(weights, ranks, strict=True) if full.issuperset(r)), len(full))
                # Rounding of sums can leave the bound where it was.
                capacity = raised if raised > capacity else capacity * (1 + TOLERANCE)
    return capacity, [[part[rank] for rank in held] for part, held in zip(flow, ranks, strict=True)]


def split_request(mapping: LayerMapping, budgets: Sequence[int], tp_size: int, *, fixed: int = 0) -> list[list[int]]:
    """Divide one request's kept tokens of one layer, ``budgets[head]``, among the replicas of its heads.

    The split, along with ``mapping.ranks``, whose slowest rank is fastest, where every head that a rank holds counts as
    `fixed` tokens more.
    """
    _, parts = split_heads(budgets, mapping.ranks, tp_size, whole=True, fixed=fixed)
    return [[int(part) for part in row] for row in parts]


def mask_of(ranks: Sequence[int]) -> int:
    """A bit for each rank."""
    return sum(1 << rank for rank in ranks)


def inside_sets(masks: ArrayLike, tp_size: int) -> NDArray[np.float64]:
    """``[masks, sets]`` of Hall's bound, on at most 12 ranks: over all sets of ranks, 1 / size where a head on the
    ranks of a mask lies in that set alone, else 0.
    """
    sets, masks = np.arange(1, 1 << tp_size), np.asarray(masks)[:, None]
    sizes = (sets[:, None] >> np.arange(tp_size) & 1).sum(axis=1)
    return ((sets & masks) == masks) / sizes


def slowest_loads(ranks: Sequence[Sequence[int]], budgets: ArrayLike, tp_size: int) -> NDArray[np.float64]:
    """``[requests]`` load of the slowest rank under the best split, for budgets ``[requests, heads]`` at one layer."""
    rows = np.asarray(budgets, dtype=np.float64)
    if 1 << tp_size > MOST_SETS:
        return np.array([split_heads(row.tolist(), ranks, tp_size)[0] for row in rows])
    highest: NDArray[np.float64] = (rows @ inside_sets([mask_of(held) for held in ranks], tp_size)).max(axis=1)
    return highest
