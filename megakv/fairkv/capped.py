"""Whole heads of all layers under a cap of memory, searched through where there are few of them."""

from __future__ import annotations

from collections.abc import Sequence

from megakv.fairkv.assignment import TOLERANCE
from megakv.fairkv.layer import LayerMapping

FEW_HEADS = 24
"""Of all layers together: above, the search would be cut off before it finds anything that smaller steps do not."""


class CappedSearch:
    """Depth first, layer by layer, the largest head first; no head is copied.

    Parameters
    ----------
    budgets : [layers][heads]
    tp_size : int
    cap : float
        Tokens that a rank may keep over all layers.
    least : sequence of float
        For each layer a load that its slowest rank cannot be below.
    """

    def __init__(self, budgets: Sequence[Sequence[float]], tp_size: int, cap: float, least: Sequence[float]):
        self.tp_size, self.cap, self.least = tp_size, cap * (1 + TOLERANCE), list(least)
        self.heads = len(budgets[0])
        self.items = [
            (weight, layer, head)
            for layer, row in enumerate(budgets)
            for weight, head in sorted(((weight, head) for head, weight in enumerate(row)), reverse=True)
        ]
        self.place = [0] * len(self.items)
        self.totals = [0.0] * tp_size
        self.loads = [[0.0] * tp_size for _ in budgets]
        self.count = [[0] * tp_size for _ in budgets]
        # Of the layers behind each: they are at their best at the earliest.
        self.behind = [sum(self.least[layer + 1 :]) for layer in range(len(budgets))]

    def run(self, best: float, nodes: int) -> list[LayerMapping] | None:
        """Mappings whose slowest ranks, summed over layers, are faster than `best`; None if there are none.

        The search ends after `nodes`, with the best found by then.
        """
        self.best, self.nodes = best, nodes
        self.found: list[int] | None = None
        self._visit(0, 0.0)
        if self.found is None:
            return None
        held: list[list[tuple[int, ...]]] = [[()] * self.heads for _ in self.loads]
        for (_, layer, head), rank in zip(self.items, self.found, strict=True):
            held[layer][head] = (rank,)
        return [LayerMapping.even(row) for row in held]

    def _visit(self, index: int, before: float) -> None:
        """`before` is the time of the layers that are complete."""
        if index == len(self.items):
            self.best, self.found = before, list(self.place)
            return
        self.nodes -= 1
        if self.nodes < 0:
            return
        weight, layer, _ = self.items[index]
        loads, count, totals = self.loads[layer], self.count[layer], self.totals
        position = index % self.heads
        last = position == self.heads - 1
        must_be_empty = self.heads - position <= count.count(0)
        slowest = max(loads)
        tried = set()
        for rank in sorted(range(self.tp_size), key=loads.__getitem__):
            state = (loads[rank], totals[rank])
            if (state, count[rank] > 0) in tried or (must_be_empty and count[rank]) or totals[rank] + weight > self.cap:
                continue
            tried.add((state, count[rank] > 0))
            reached = max(slowest, loads[rank] + weight)
            if before + max(reached, self.least[layer]) + self.behind[layer] >= self.best * (1 - TOLERANCE):
                continue
            loads[rank], totals[rank] = loads[rank] + weight, totals[rank] + weight
            count[rank] += 1
            self.place[index] = rank
            self._visit(index + 1, before + reached if last else before)
            loads[rank], totals[rank] = state
            count[rank] -= 1
            if self.nodes < 0:
                return
