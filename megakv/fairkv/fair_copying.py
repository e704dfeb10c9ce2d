"""Fair-copying: one layer's KV heads on ranks, some with replicas (FairKV-DP, Section 4 and Algorithms 1-2).

Where replicas share a head equally, the schemes are Algorithm 1's; Algorithm 2's exhaustive placing of each is replaced
by `megakv.fairkv.assignment`, for its own criterion, the smallest difference between the fullest and the emptiest rank,
as for the slowest rank. Where they may share it in any way there are fewer: replicas and ranks form a forest, so
with C copies the ranks fall into R - C groups, and inside a group of s ranks McNaughton's wrap-around rule makes all of
them equally loaded with s - 1 cuts. A scheme then says how many ranks each group has. Without copies it is one of each:
the paper's best-effort assignment (FairKV-NoDP).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from math import ceil, comb, inf
from typing import Literal

import numpy as np

from megakv.cache.layer import LayerMapping
from megakv.cache.splitting import split_heads
from megakv.fairkv.assignment import TOLERANCE, Criterion, Schemes, assign, largest_first, positive
from megakv.fairkv.copy_limits import CopyLimits
from megakv.fairkv.requests import place_for_requests

Split = Literal["even", "free"]

MOST_SCHEMES = 12_000
STARTS = 8
"""Schemes whose placements are improved where R_max or CH bind."""
ORDERS, CLOSE = 30, 1e-4
"""Orders in which heads with fixed parts go on the ranks of a group; and levels that are as good as equal, relative."""


@dataclass(frozen=True)
class LayerSolution:
    """A layer's mapping, the load of its slowest rank, and a bound that no mapping within the limits is below, by the
    criterion that it was found by.
    """

    mapping: LayerMapping
    slowest: float
    bound: float


def copy_schemes(heads: int, copies: int, *, max_replicas: int, copied_heads: int) -> Iterator[tuple[int, ...]]:
    """Algorithm 1: the replicas of each head, in every way within the limits, which the paper's listing lacks."""
    if not heads:
        yield ()
        return
    for extra in range((min(copies, max_replicas - 1) if copied_heads else 0) + 1):
        rest = copy_schemes(
            heads - 1, copies - extra, max_replicas=max_replicas, copied_heads=copied_heads - bool(extra)
        )
        for scheme in rest:
            yield (1 + extra, *scheme)


@lru_cache(maxsize=32)
def _even_schemes(heads: int, limits: CopyLimits) -> Schemes:
    """Where there are too many, only the largest heads are copied: as many of them as keep the table small."""
    copied = heads if limits.copied_heads is None else limits.copied_heads
    copies, largest = limits.most(heads), heads
    while largest > 1 and comb(largest + copies, copies) > MOST_SCHEMES:
        largest -= 1
    while True:
        rows = list(copy_schemes(largest, copies, max_replicas=limits.replicas, copied_heads=copied))
        table = np.pad(np.array(rows), ((0, 0), (0, heads - largest)), constant_values=1)
        table = table[table.sum(axis=1) >= limits.tp_size]
        if len(table):
            return Schemes(table, np.ones((len(table), limits.tp_size), dtype=np.int64), largest == heads)
        largest += 1


def _sizes(groups: int, ranks: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ways to write `ranks` as so many positive numbers, the largest first, the most equal ones first."""
    if groups == 0:
        yield ()
        return
    for first in range(ceil(ranks / groups), min(most, ranks - groups + 1) + 1):
        for rest in _sizes(groups - 1, ranks - first, first):
            yield (first, *rest)


@lru_cache(maxsize=32)
def _group_schemes(heads: int, groups: int, ranks: int) -> Schemes:
    rows = list(islice(_sizes(groups, ranks, ranks), MOST_SCHEMES + 1))
    speeds = np.array(rows[:MOST_SCHEMES], dtype=np.int64)
    return Schemes(np.ones((len(speeds), heads), dtype=np.int64), speeds, len(rows) <= MOST_SCHEMES)


def wrap_around(
    weights: Sequence[float], members: Sequence[int], ranks: Sequence[int], fixed: float = 0.0
) -> dict[int, dict[int, float]]:
    """McNaughton's rule: heads one after the other fill one rank after the other, each to the same level.

    Returns from head to rank to share; at most ``len(ranks) - 1`` of the `members` are cut. On each of its ranks a head
    takes `fixed` beside its part; where no more than that is left of a rank, the next head begins on the next one.
    """
    total = sum(weights[head] for head in members)
    level = (total + fixed * (len(members) + len(ranks) - 1)) / len(ranks)
    # A sliver would be a replica for nothing.
    sliver, at, room = total * TOLERANCE, 0, level
    parts: dict[int, dict[int, float]] = {head: {} for head in members}
    for head in members:
        left = weights[head]
        while left > sliver or not parts[head]:
            last = at == len(ranks) - 1
            if room - fixed <= sliver and not last:
                at, room = at + 1, level
                continue
            part = left if last or left <= room - fixed + sliver else room - fixed
            parts[head][ranks[at]] = part / weights[head]
            left, room = left - part, room - fixed - part
    return parts


def _wrapped(
    weights: Sequence[float], members: list[int], ranks: Sequence[int], fixed: float
) -> dict[int, dict[int, float]]:
    """The same by the order of heads that fills ranks best, and with parts that are the best for where heads are then.

    Without fixed parts any order fills them, and the largest first leaves small heads whole.
    """
    if not fixed or len(ranks) == 1:
        return wrap_around(weights, members, ranks)
    level = (sum(weights[head] for head in members) + fixed * (len(members) + len(ranks) - 1)) / len(ranks)
    random, best = np.random.default_rng(0), inf
    found: dict[int, dict[int, float]] = {}
    orders = chain([members, members[::-1]], (random.permutation(members).tolist() for _ in range(ORDERS)))
    for order in orders:
        parts = wrap_around(weights, order, ranks, fixed)
        for empty in set(ranks).difference(*parts.values()):
            _give(parts, empty)
        held = [[rank - ranks[0] for rank in parts[head]] for head in members]
        slowest, shares = split_heads([weights[head] for head in members], held, len(ranks), fixed=fixed)
        if slowest < best * (1 - TOLERANCE):
            best = slowest
            # What is lost beside fixed parts has no shares of its own.
            found = {
                head: {
                    rank: share / total if (total := sum(own)) > 0 else 1 / len(own)
                    for rank, share in zip(parts[head], own, strict=True)
                }
                for head, own in zip(members, shares, strict=True)
            }
        if best <= level * (1 + CLOSE):
            break
    return found


def _give(parts: dict[int, dict[int, float]], empty: int) -> None:
    """A rank without a head takes one of a rank that has several, or becomes one more of the largest head's."""
    count = Counter(rank for held in parts.values() for rank in held)
    full, most = count.most_common(1)[0]
    if most > 1:
        head = [head for head, held in parts.items() if full in held][-1]
        parts[head][empty] = parts[head].pop(full)
    else:
        next(iter(parts.values()))[empty] = 0.0


def _filled(held: list[tuple[int, ...]], places: int) -> list[tuple[int, ...]]:
    """The same with a replica at every place: an empty one takes the smallest of one that has several."""
    count = [sum(place in at for at in held) for place in range(places)]
    for empty in [place for place in range(places) if not count[place]]:
        full = max(range(places), key=count.__getitem__)
        head = max(head for head, at in enumerate(held) if full in at)
        held[head] = tuple(empty if place == full else place for place in held[head])
        count[full], count[empty] = count[full] - 1, 1
    return held


def _grouped(weights: Sequence[float], groups: int, size: int, fixed: float) -> tuple[LayerMapping, float]:
    """Heads, the largest first, in groups of ranks that share them by the wrap-around rule; and the bound.

    Of s ranks that share m heads, m + s - 1 replicas take a fixed part each: beside one a rank, m - 1 do.
    """
    found = assign(weights, _group_schemes(len(weights), groups, size), fixed=fixed, start=-fixed)
    members: list[list[int]] = [[] for _ in range(groups)]
    for head, (group,) in enumerate(_filled(found.places, groups)):
        members[group].append(head)
    sums = [sum(weights[head] + fixed for head in group) - fixed for group in members]
    ranks = [1] * groups
    for _ in range(size - groups):
        ranks[max(range(groups), key=lambda group: sums[group] / ranks[group])] += 1
    parts: dict[int, dict[int, float]] = {}
    for group, held in enumerate(members):
        # The largest first: fewer heads have more than two replicas, and the small ones stay whole.
        first = sum(ranks[:group])
        parts |= _wrapped(weights, held, range(first, first + ranks[group]), fixed)
    return LayerMapping.of([parts[head] for head in range(len(weights))]), found.bound + fixed


def _evenly(
    weights: Sequence[float], limits: CopyLimits, fixed: float = 0.0, criterion: Criterion = "slowest"
) -> tuple[LayerMapping, float]:
    schemes, size = _even_schemes(len(weights), limits), limits.tp_size
    found = assign(weights, schemes, fixed=fixed, criterion=criterion)
    mapping = LayerMapping.even(_filled(found.places, size))
    if criterion == "difference":
        # Where the slowest rank is fastest, differences may be smaller than where they were looked for.
        fast, _ = _evenly(weights, limits, fixed)
        mapping = min(mapping, fast, key=lambda each: max(loads := each.loads(weights, size)) - min(loads))
    return mapping, found.bound


def _limited(weights: Sequence[float], limits: CopyLimits, fixed: float) -> Iterator[LayerMapping]:
    """Where R_max or CH allow no groups: equal shares by the schemes that begin best, and replicas that move from there
    while that helps.
    """
    schemes = _even_schemes(len(weights), limits)
    sizes = np.asarray(weights) / schemes.counts + fixed
    times, held = largest_first(sizes, schemes, np.argsort(-sizes, axis=1, kind="stable"))
    for row in np.argsort(times.max(axis=1), kind="stable")[:STARTS]:
        places = [tuple(np.flatnonzero(head).tolist()) for head in held[row]]
        even = LayerMapping.even(_filled(places, limits.tp_size))
        even = even.with_shares(split_heads(weights, even.ranks, limits.tp_size, fixed=fixed)[1])
        yield place_for_requests(even, weights, [], limits, fixed=fixed)


def _freely(weights: Sequence[float], limits: CopyLimits, fixed: float) -> tuple[LayerMapping, float]:
    """Nearly the best, with the bound of what R_max and CH do not rule out."""
    size = limits.tp_size
    best, bound = _grouped(weights, max(1, size - limits.copies), size, fixed)
    if not limits.allow(best.replicas):
        best = min(_limited(weights, limits, fixed), key=lambda mapping: slowest_rank(mapping, weights, size, fixed))
    return best, bound


def slowest_rank(mapping: LayerMapping, weights: Sequence[float], size: int, fixed: float = 0.0) -> float:
    """Its load, each head that it holds counted as `fixed` more."""
    counts = [sum(rank in held for held in mapping.ranks) for rank in range(size)]
    return max(load + fixed * count for load, count in zip(mapping.loads(weights, size), counts, strict=True))


def map_layer(
    weights: Sequence[float],
    limits: CopyLimits,
    split: Split = "free",
    *,
    fixed: float = 0.0,
    criterion: Criterion = "slowest",
) -> LayerSolution:
    """One layer's heads on ranks so that the slowest rank is fastest, within `limits` that are checked already.

    Replicas may share a head in any way ("free") or equally ("even"); each takes `fixed` beside its part of the weight.
    With a free split and fixed parts, the solution is the best of those with as many copies as `limits` allow. For the
    smallest difference between the fullest and the emptiest rank replicas share only equally.
    """
    order = sorted(range(len(weights)), key=lambda head: -weights[head])
    raised = positive([weights[head] for head in order])
    if split == "free" and criterion == "slowest":
        found, bound = _freely(raised, limits, fixed)
    else:
        found, bound = _evenly(raised, limits, fixed, criterion)
    back = [order.index(head) for head in range(len(weights))]
    mapping = LayerMapping(tuple(found.ranks[at] for at in back), tuple(found.shares[at] for at in back))
    slowest = slowest_rank(mapping, weights, limits.tp_size, fixed)
    value = slowest - (min(mapping.loads(weights, limits.tp_size)) if criterion == "difference" else 0.0)
    # What was added to heads that keep nothing is no part of the bound.
    return LayerSolution(mapping, slowest, min(value, max(0.0, bound - (sum(raised) - sum(weights)))))
