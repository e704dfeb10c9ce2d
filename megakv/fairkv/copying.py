"""Fair-copying: one layer's KV heads on ranks, some with replicas (FairKV-DP, Section 4 and Algorithms 1-2).

Algorithm 1 lists how often each head is copied, Algorithm 2 tries every way to place the replicas. Both are here a
search with bounds (`megakv.fairkv.schemes`) where replicas share a head equally. Where they may share it in any way the
search is smaller: replicas and ranks form a forest, so with C copies the ranks fall into R - C groups, and inside a
group of s ranks McNaughton's wrap-around rule makes all of them equally loaded with s - 1 cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megakv.fairkv.assignment import NODES, TOLERANCE, group_heads, positive
from megakv.fairkv.layer import LayerMapping
from megakv.fairkv.limits import CopyLimits
from megakv.fairkv.schemes import place_evenly
from megakv.fairkv.splitting import split_heads

Split = Literal["even", "free"]


@dataclass(frozen=True)
class LayerSolution:
    """A layer's mapping and how good it is.

    Parameters
    ----------
    mapping : LayerMapping
    slowest : float
        Load of its slowest rank.
    bound : float
        No mapping within the limits is below it; equal to `slowest` where that is proven to be the optimum.
    """

    mapping: LayerMapping
    slowest: float
    bound: float


def wrap_around(weights: Sequence[float], members: Sequence[int], ranks: Sequence[int]) -> dict[int, dict[int, float]]:
    """McNaughton's rule: heads one after the other fill one rank after the other, each to the same level.

    Parameters
    ----------
    weights : sequence of float
        Positive budgets, by head.
    members, ranks : sequence of int
        The heads, and the ranks that they are to fill.

    Returns
    -------
    dict
        From head to rank to share; at most ``len(ranks) - 1`` heads are cut.
    """
    total = sum(weights[head] for head in members)
    level = total / len(ranks)
    parts: dict[int, dict[int, float]] = {head: {} for head in members}
    at, room = 0, level
    for head in members:
        left = weights[head]
        while left > total * TOLERANCE:
            if room <= total * TOLERANCE and at + 1 < len(ranks):
                at, room = at + 1, level
            part = min(left, room) if at + 1 < len(ranks) else left
            # A sliver that stays behind would be a replica for nothing.
            part = left if left - part <= total * TOLERANCE else part
            parts[head][ranks[at]] = parts[head].get(ranks[at], 0.0) + part / weights[head]
            left, room = left - part, room - part
    return parts


def copy_freely(weights: Sequence[float], limits: CopyLimits, *, nodes: int = NODES) -> LayerSolution:
    """The mapping whose slowest rank is fastest when replicas may share a head in any way.

    Exact where neither R_max nor CH rules the optimum out; then the better of two that keep them: smaller groups, and
    the best with equal shares, its shares made the best for that placement.
    """
    size, raised = limits.tp_size, positive(weights)
    grouping = group_heads(raised, max(1, size - limits.copies), size, nodes=nodes)
    mapping = _cut(raised, grouping.members, grouping.ranks)
    # What was added to heads that keep nothing is no part of the bound.
    bound = max(0.0, grouping.bound - (sum(raised) - sum(weights)))
    if not limits.allow([len(held) for held in mapping.ranks]):
        return _within_limits(weights, limits, bound, nodes)
    return LayerSolution(mapping, max(mapping.loads(weights, size)), bound)


def _cut(weights: Sequence[float], members: Sequence[Sequence[int]], ranks: Sequence[int]) -> LayerMapping:
    parts: list[dict[int, float]] = [{} for _ in weights]
    first = 0
    for group, count in zip(members, ranks, strict=True):
        # The largest first: fewer heads have more than two replicas, and the small ones stay whole.
        largest = sorted(group, key=lambda head: -weights[head])
        for head, part in wrap_around(weights, largest, range(first, first + count)).items():
            parts[head] = part
        first += count
    return LayerMapping.of(parts)


def _within_limits(weights: Sequence[float], limits: CopyLimits, bound: float, nodes: int) -> LayerSolution:
    size, raised = limits.tp_size, positive(weights)
    even = place_evenly(weights, limits, nodes=nodes)
    level, parts = split_heads(weights, even.ranks, size)
    best = LayerSolution(LayerMapping.even(even.ranks).with_shares(parts), level, bound)
    for cuts in range(min(limits.copies, size - 1), -1, -1):
        groups = size - cuts
        if groups > len(weights):
            break
        grouping = group_heads(raised, groups, size, nodes=nodes)
        mapping = _cut(raised, grouping.members, grouping.ranks)
        slowest = max(mapping.loads(weights, size))
        if slowest < best.slowest * (1 - TOLERANCE) and limits.allow([len(held) for held in mapping.ranks]):
            best = LayerSolution(mapping, slowest, bound)
    return best


def copy_evenly(weights: Sequence[float], limits: CopyLimits, *, nodes: int = NODES) -> LayerSolution:
    """The mapping whose slowest rank is fastest when replicas share a head equally."""
    placed = place_evenly(weights, limits, nodes=nodes)
    return LayerSolution(LayerMapping.even(placed.ranks), placed.slowest, placed.bound)


def map_layer(
    weights: Sequence[float], limits: CopyLimits, split: Split = "free", *, nodes: int = NODES
) -> LayerSolution:
    """One layer's heads on ranks so that the slowest rank is fastest.

    Parameters
    ----------
    weights : sequence of float
        Budget of each KV head, finite and not negative.
    limits : CopyLimits
        Checked against the number of heads.
    split : {"free", "even"}
        Whether replicas may share a head in any way or equally.
    nodes : int
        Of the search tree; what is found until then is taken.
    """
    return (copy_freely if split == "free" else copy_evenly)(weights, limits, nodes=nodes)
