"""Mappings within each rank's memory, at the least price in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megakv.fairkv.arrangement import arrange, memory_of
from megakv.fairkv.assignment import NODES, TOLERANCE
from megakv.fairkv.capped import FEW_HEADS, CappedSearch
from megakv.fairkv.copying import Split, map_layer
from megakv.fairkv.layer import LayerMapping
from megakv.fairkv.limits import CopyLimits
from megakv.fairkv.totals import TotalSolution, Weights, least_total

STEPS = 500


@dataclass
class _Change:
    """Takes `amount` of a layer's load from a rank and gives it to another."""

    layer: int
    source: int
    goal: int
    amount: float
    apply: Callable[[list[dict[int, float]]], None]


class _Search:
    """Changes mappings one step at a time."""

    def __init__(self, mappings: Sequence[LayerMapping], budgets: Weights, size: int, cap: float, split: Split):
        self.budgets, self.size, self.cap, self.split = budgets, size, cap, split
        self.parts = [
            [dict(zip(held, shares, strict=True)) for held, shares in zip(m.ranks, m.shares, strict=True)]
            for m in mappings
        ]
        self.loads = [m.loads(row, size) for m, row in zip(mappings, budgets, strict=True)]
        self.totals = [sum(column) for column in zip(*self.loads, strict=True)]

    @property
    def excess(self) -> float:
        """Tokens above the cap, over all ranks."""
        return sum(self._over(total) for total in self.totals)

    def _over(self, total: float) -> float:
        return max(0.0, total - self.cap) if total > self.cap * (1 + TOLERANCE) else 0.0

    def changes(self, layer: int, source: int) -> Iterator[_Change]:
        """Everything that one step can do with what `source` has of a layer."""
        row, parts, loads = self.budgets[layer], self.parts[layer], self.loads[layer]
        mine = [head for head, part in enumerate(parts) if source in part]
        for goal in range(self.size):
            if goal == source:
                continue
            yield _Change(layer, source, goal, loads[source] - loads[goal], _exchanged(source, goal))
            for head in mine:
                amount = row[head] * parts[head][source]
                if goal not in parts[head]:
                    if len(mine) > 1:
                        yield _Change(layer, source, goal, amount, _moved(head, source, goal))
                    for other, part in enumerate(parts):
                        if goal in part and source not in part:
                            less = amount - row[other] * part[goal]
                            yield _Change(layer, source, goal, less, _swapped(head, source, other, goal))
                elif self.split == "free" and row[head] > 0:
                    over, room = self._over(self.totals[source]), self.cap - self.totals[goal]
                    for part in {amount / 2, min(amount / 2, (loads[source] - loads[goal]) / 2), over, room}:
                        if 0 < part <= amount / 2:
                            yield _Change(layer, source, goal, part, _shifted(head, source, goal, part / row[head]))

    def effect(self, change: _Change) -> tuple[float, float]:
        """How much excess and how much time it takes away."""
        loads, totals = self.loads[change.layer], self.totals
        source, goal, amount = change.source, change.goal, change.amount
        after = [load for rank, load in enumerate(loads) if rank not in (source, goal)]
        time = max(loads) - max([*after, loads[source] - amount, loads[goal] + amount])
        excess = (
            self._over(totals[source])
            + self._over(totals[goal])
            - self._over(totals[source] - amount)
            - self._over(totals[goal] + amount)
        )
        return excess, time

    def apply(self, change: _Change) -> None:
        """Make the change."""
        change.apply(self.parts[change.layer])
        mapping = LayerMapping.of(self.parts[change.layer])
        self.loads[change.layer] = mapping.loads(self.budgets[change.layer], self.size)
        self.totals = [sum(column) for column in zip(*self.loads, strict=True)]

    def repair(self) -> None:
        """Take away the excess, each time where a token less costs least time."""
        for _ in range(STEPS):
            if not self.excess:
                return
            best, step = (-float("inf"), 0.0), None
            for source, total in enumerate(self.totals):
                if not self._over(total):
                    continue
                for layer in range(len(self.loads)):
                    for change in self.changes(layer, source):
                        excess, time = self.effect(change)
                        if excess > self.cap * TOLERANCE:
                            rating = (min(time, 0.0) / excess, excess)
                            if rating > best:
                                best, step = rating, change
            if step is None:
                return
            self.apply(step)

    def quicken(self) -> None:
        """Take away time where that leaves every rank within its memory."""
        for _ in range(STEPS):
            best, step = 0.0, None
            for layer, loads in enumerate(self.loads):
                slowest = max(range(self.size), key=loads.__getitem__)
                for change in self.changes(layer, slowest):
                    excess, time = self.effect(change)
                    if excess >= 0 and time > max(best, loads[slowest] * TOLERANCE):
                        best, step = time, change
            if step is None:
                return
            self.apply(step)

    def mappings(self) -> list[LayerMapping]:
        """What it has come to."""
        return [LayerMapping.of(parts) for parts in self.parts]

    @property
    def time(self) -> float:
        """Sum over layers of the slowest rank."""
        return sum(map(max, self.loads))


def _exchanged(source: int, goal: int) -> Callable[[list[dict[int, float]]], None]:
    def apply(parts: list[dict[int, float]]) -> None:
        turned = {source: goal, goal: source}
        parts[:] = [{turned.get(rank, rank): share for rank, share in part.items()} for part in parts]

    return apply


def _moved(head: int, source: int, goal: int) -> Callable[[list[dict[int, float]]], None]:
    def apply(parts: list[dict[int, float]]) -> None:
        parts[head][goal] = parts[head].pop(source)

    return apply


def _swapped(head: int, source: int, other: int, goal: int) -> Callable[[list[dict[int, float]]], None]:
    def apply(parts: list[dict[int, float]]) -> None:
        parts[head][goal] = parts[head].pop(source)
        parts[other][source] = parts[other].pop(goal)

    return apply


def _shifted(head: int, source: int, goal: int, share: float) -> Callable[[list[dict[int, float]]], None]:
    def apply(parts: list[dict[int, float]]) -> None:
        parts[head][source] -= share
        parts[head][goal] += share

    return apply


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
    does not suffice by the changes that cost least. Those are not proven to be the best, except for few heads in all.

    Parameters
    ----------
    budgets : [layers][heads]
    limits : CopyLimits
        Checked against the number of heads.
    split : {"free", "even"}
    memory_cap : float, optional
        Tokens that a rank may keep, summed over its heads and all layers.
    nodes : int
        Of the search tree of one layer.

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
    solutions = [map_layer(row, limits, split, nodes=nodes) for row in budgets]
    bound = sum(solution.bound for solution in solutions)
    mappings = arrange([solution.mapping for solution in solutions], budgets, size)
    if memory_cap is None or max(memory_of(mappings, budgets, size)) <= memory_cap * (1 + TOLERANCE):
        return mappings, bound
    found = []
    first = _Search(mappings, budgets, size, memory_cap, split)
    first.repair()
    if not first.excess:
        found.append(first)
    # The other end: from the mappings that need least memory towards faster ones.
    least = least_total(budgets, limits, split, nodes=nodes)
    second = _Search(least.mappings, budgets, size, memory_cap, split)
    if not second.excess:
        found.append(second)
    if not found:
        check_cap(memory_cap, least, size)
    for search in found:
        search.quicken()
    best = min(found, key=lambda search: search.time)
    if not limits.copies and sum(map(len, budgets)) <= FEW_HEADS:
        exact = CappedSearch(budgets, size, memory_cap, [solution.bound for solution in solutions])
        return exact.run(best.time, nodes) or best.mappings(), bound
    return best.mappings(), bound


def check_cap(cap: float | None, least: TotalSolution, size: int) -> None:
    """Refuse a cap that even the mappings with the smallest largest total exceed.

    Raises
    ------
    ValueError
        Naming the cap, whether it is proven to be infeasible, and what is needed.
    """
    if cap is None or least.largest <= cap * (1 + TOLERANCE):
        return
    how = "is infeasible" if least.bound > cap * (1 + TOLERANCE) else "cannot be met by any mapping found"
    raise ValueError(
        f"memory_cap = {cap:g} tokens on each of {size} ranks {how}: the least that the fullest rank can keep is "
        f"{least.largest:.6g}; raise it to that or more, or use more ranks, more copies or smaller budgets"
    )
