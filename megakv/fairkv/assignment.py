"""Best-effort assignment: KV heads in groups whose ranks are equally loaded, by branch and bound.

Without copies every group has one rank: the paper's best-effort assignment (FairKV-NoDP). With them a group of s ranks
holds its heads with s - 1 cuts (`megakv.fairkv.copying`), so that the same search is exact for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil

TOLERANCE = 1e-9
"""Relative; two loads closer than this are equal."""
NODES = 20_000
"""Of a search tree, after which the best found so far is taken: 8 KV heads never need as many, 32 may."""
MANY_HEADS = 16
"""KV heads per layer above which searches are cut off early: they prove nothing any more, and find little."""
LEAST = 1e-8
"""Of all budgets together: what a head counts at least, so that no rank is left with nothing at all."""
FIRST_SIZES = 64
"""Ways to divide the ranks among groups from which the search starts."""


@dataclass
class Grouping:
    """Heads in groups, and ranks for every group.

    Parameters
    ----------
    members : list of list of int
        Heads of each group.
    ranks : list of int
        How many ranks each group has.
    slowest : float
        The load of the slowest rank: the largest of a group's budget over its ranks.
    bound : float
        No grouping is below it; equal to `slowest` where that is proven to be the optimum.
    """

    members: list[list[int]]
    ranks: list[int]
    slowest: float
    bound: float


def positive(weights: Sequence[float]) -> list[float]:
    """The same with a little for heads that keep nothing."""
    total = sum(weights)
    least = total * LEAST if total > 0 else 1.0
    return [max(weight, least) for weight in weights]


def lower_bound(weights: Sequence[float], n_groups: int, n_ranks: int) -> float:
    """A load that the slowest rank cannot be below."""
    bound = sum(weights) / n_ranks
    if n_groups == n_ranks:
        largest = sorted(weights, reverse=True)
        bound = max(bound, largest[0])
        # Of the first kR + 1 heads some rank has k + 1.
        for k in range(1, (len(largest) - 1) // n_ranks + 1):
            bound = max(bound, sum(largest[k * (n_ranks - 1) : k * n_ranks + 1]))
    return bound


def divide_ranks(sums: Sequence[float], n_ranks: int) -> list[int]:
    """Ranks of each group so that the largest of sum over ranks is least; every group gets one."""
    ranks = [1] * len(sums)
    for _ in range(n_ranks - len(sums)):
        slowest = max(range(len(sums)), key=lambda g: sums[g] / ranks[g])
        ranks[slowest] += 1
    return ranks


def _sizes(n_groups: int, n_ranks: int, most: int) -> Iterator[list[int]]:
    """Ways to write n_ranks as n_groups positive numbers, the largest first, the most equal ones first."""
    if n_groups == 1:
        if n_ranks <= most:
            yield [n_ranks]
        return
    for first in range(ceil(n_ranks / n_groups), min(most, n_ranks - n_groups + 1) + 1):
        for rest in _sizes(n_groups - 1, n_ranks - first, first):
            yield [first, *rest]


@dataclass
class _Search:
    """Depth-first search over the heads, the largest first."""

    weights: list[float]
    n_groups: int
    n_ranks: int
    bound: float
    best: float = float("inf")
    found: list[int] = field(default_factory=list)
    nodes: int = 0
    exhausted: bool = True

    def run(self, limit: int) -> None:
        heads = len(self.weights)
        self.remaining = [0.0] * (heads + 1)
        for index in range(heads - 1, -1, -1):
            self.remaining[index] = self.remaining[index + 1] + self.weights[index]
        self.limit = limit
        self.sums = [0.0] * self.n_groups
        self.chosen = [0] * heads
        self._visit(0, 0)

    def offer(self, chosen: Sequence[int]) -> None:
        """Keep a complete assignment if it is the best so far."""
        sums = [0.0] * self.n_groups
        for weight, group in zip(self.weights, chosen, strict=True):
            sums[group] += weight
        ranks = divide_ranks(sums, self.n_ranks)
        value = max(total / count for total, count in zip(sums, ranks, strict=True))
        if value < self.best * (1 - TOLERANCE):
            self.best, self.found = value, list(chosen)

    @property
    def done(self) -> bool:
        return self.best <= self.bound * (1 + TOLERANCE)

    def _visit(self, index: int, used: int) -> None:
        if index == len(self.weights):
            self.offer(self.chosen)
            return
        self.nodes += 1
        if self.nodes > self.limit:
            self.exhausted = False
            return
        weight, sums = self.weights[index], self.sums
        heads_left = len(self.weights) - index
        if heads_left > self.n_groups - used:
            choices = sorted(range(used), key=sums.__getitem__)
            if used < self.n_groups:
                choices.insert(0, used)
        else:
            choices = [used]
        tried = -1.0
        for group in choices:
            before = sums[group]
            if group < used and before == tried:
                continue
            tried = before if group < used else tried
            sums[group] = before + weight
            self.chosen[index] = group
            if self._possible(index + 1, max(used, group + 1)):
                self._visit(index + 1, max(used, group + 1))
            sums[group] = before
            if self.done or not self.exhausted:
                return

    def _possible(self, index: int, used: int) -> bool:
        """Whether a better end can follow: the ranks suffice, and the heads that are left find room."""
        target = self.best * (1 - TOLERANCE)
        if target == float("inf"):
            return True
        spare = self.n_ranks
        room = 0.0
        least = self.weights[-1]
        for total in self.sums:
            # An empty group will have a head, so it needs a rank.
            need = max(1, ceil(total / target - 1e-12))
            spare -= need
            left = need * target - total
            if left >= least:
                room += left
        if spare < 0:
            return False
        # A group that is given one of the spare ranks can use what else would be wasted of its last one.
        return spare > 0 or room >= self.remaining[index] * (1 - TOLERANCE)


def group_heads(weights: Sequence[float], n_groups: int, n_ranks: int, *, nodes: int = NODES) -> Grouping:
    """Divide heads into groups and ranks among the groups so that the slowest rank is fastest.

    Exact unless the search is cut off at `nodes`; the bound then says how far from the optimum it can be.

    Parameters
    ----------
    weights : sequence of float
        Budget of each head, not negative; at least as many as groups.
    n_groups : int
        No group is left empty.
    n_ranks : int
        At least as many as groups.
    """
    assert n_groups <= min(len(weights), n_ranks)
    order = sorted(range(len(weights)), key=lambda head: -weights[head])
    ordered = [weights[head] for head in order]
    search = _Search(ordered, n_groups, n_ranks, lower_bound(weights, n_groups, n_ranks))
    for number, sizes in enumerate(_sizes(n_groups, n_ranks, n_ranks)):
        if number == FIRST_SIZES or search.done:
            break
        search.offer(exchanged(ordered, _largest_first(ordered, sizes), sizes))
    if not search.done:
        search.run(nodes)
    members: list[list[int]] = [[] for _ in range(n_groups)]
    for head, group in zip(order, search.found, strict=True):
        members[group].append(head)
    ranks = divide_ranks([sum(weights[head] for head in group) for group in members], n_ranks)
    bound = search.best if search.exhausted else search.bound
    return Grouping([sorted(group) for group in members], ranks, search.best, bound)


def _largest_first(ordered: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """Every head to the group whose ranks it loads least; as many last heads as there are empty groups fill those."""
    sums, chosen = [0.0] * len(sizes), []
    empty = set(range(len(sizes)))
    for index, weight in enumerate(ordered):
        choices = empty if len(ordered) - index <= len(empty) else range(len(sizes))
        group = min(choices, key=lambda g: ((sums[g] + weight) / sizes[g], g))
        sums[group] += weight
        empty.discard(group)
        chosen.append(group)
    return chosen


def exchanged(weights: Sequence[float], chosen: list[int], sizes: Sequence[int]) -> list[int]:
    """Move and exchange heads between the slowest group and the others until that helps no more.

    The search alone improves the last heads that it placed first, which for many heads is too late to matter.
    """
    chosen = list(chosen)
    members: list[list[int]] = [[] for _ in sizes]
    for head, group in enumerate(chosen):
        members[group].append(head)
    sums = [sum(weights[head] for head in group) for group in members]
    while True:
        slow = max(range(len(sizes)), key=lambda g: sums[g] / sizes[g])
        level = sums[slow] / sizes[slow]
        best, step = level * (1 - TOLERANCE), None
        for other in range(len(sizes)):
            if other == slow:
                continue
            for head in members[slow]:
                for partner in (None, *members[other]):
                    if partner is None and len(members[slow]) == 1:
                        continue
                    change = weights[head] - (0.0 if partner is None else weights[partner])
                    if change <= 0:
                        continue
                    value = max((sums[slow] - change) / sizes[slow], (sums[other] + change) / sizes[other])
                    if value < best:
                        best, step = value, (head, partner, other, change)
        if step is None:
            return chosen
        head, partner, other, change = step
        for item, source, goal in ((head, slow, other), (partner, other, slow)):
            if item is not None:
                members[source].remove(item)
                members[goal].append(item)
                chosen[item] = goal
        sums[slow] -= change
        sums[other] += change
