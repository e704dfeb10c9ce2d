"""Placements for requests unlike the profile: where copies go that the profile itself has no use for.

R - 1 copies make all ranks equal for the budgets of the profile, wherever they go; a request has other budgets, and its
own split (`megakv.cache.splitting`) can only use the replicas that there are. So copies are placed for many requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megakv.cache.layer import LayerMapping
from megakv.cache.splitting import inside_sets, mask_of, split_heads
from megakv.fairkv.assignment import TOLERANCE
from megakv.fairkv.copy_limits import CopyLimits

PROFILE_WEIGHT = 10.0
"""Of the profile's own budgets beside the mean over requests: they stay balanced."""
ROUNDS = 30
MOST_RANKS = 8
MANY_HEADS = 16
"""In a layer, above which replicas are not moved any more: it takes long, and finds little."""
UNLIKE, IMAGINED = 0.5, 24


def imagined_requests(weights: Sequence[float]) -> NDArray[np.float64]:
    """``[requests, heads]`` around a profile without prompts: log-normal, as far as AdaKV's on Llama-3.1-8B lie."""
    noise = np.random.default_rng(0).standard_normal((IMAGINED, len(weights)))
    return np.asarray(weights, dtype=np.float64) * np.exp(UNLIKE * noise)


class _Requests:
    """How slow the slowest rank is for each request under its own best split; placements are a mask of ranks per
    head.
    """

    def __init__(self, requests: NDArray[np.float64], limits: CopyLimits, first: float, fixed: float):
        self.limits, self.size = limits, limits.tp_size
        mean = requests.sum(axis=1) / self.size
        # Relative to the mean load, so that a value of 1 is perfect; requests without any tokens do not count.
        self.requests = requests[mean > 0] / mean[mean > 0, None]
        self.fixed = fixed / mean[mean > 0, None]
        self.importance = np.append(first, np.ones(len(self.requests) - 1))
        # [masks, sets]: what a head there adds to the bound of every set of ranks.
        self.inside = inside_sets(np.arange(1 << self.size), self.size)
        # [masks, sets]: what its replicas add beside that, each of which is on its rank alone.
        alone = np.arange(1 << self.size)[:, None] >> np.arange(self.size) & 1
        self.replicas = alone @ self.inside[1 << np.arange(self.size)]

    def bounds(self, masks: Sequence[int]) -> NDArray[np.float64]:
        """[requests, sets] of Hall's condition."""
        found: NDArray[np.float64] = self.requests @ self.inside[masks]
        return found + self.fixed * self.replicas[masks].sum(axis=0)

    def value(self, masks: Sequence[int]) -> float:
        return float((self.bounds(masks).max(axis=1) * self.importance).sum())

    def best_addition(self, masks: Sequence[int], heads: Iterable[int]) -> tuple[float, list[int]] | None:
        """The best placement with one replica more, within the limits, and its value."""
        best: tuple[float, list[int]] | None = None
        held, counts = self.bounds(masks), [mask.bit_count() for mask in masks]
        for head in heads:
            further = [masks[head] | 1 << rank for rank in range(self.size) if not masks[head] >> rank & 1]
            if not further or not self.limits.allow([count + (other == head) for other, count in enumerate(counts)]):
                continue
            change = self.inside[further] - self.inside[masks[head]]
            # [masks, requests, sets]
            trial = held + change[:, None] * self.requests[:, head, None]
            trial += (self.replicas[further] - self.replicas[masks[head]])[:, None] * self.fixed
            values = (trial.max(axis=2) * self.importance).sum(axis=1)
            if best is None or values.min() < best[0] * (1 - TOLERANCE):
                best = float(values.min()), [*masks[:head], further[int(values.argmin())], *masks[head + 1 :]]
        return best

    def best_exchange(self, masks: Sequence[int]) -> tuple[float, list[int]]:
        """The best placement with another replica in place of one, and its value."""
        best = inf, list(masks)
        for head, rank in product(range(len(masks)), range(self.size)):
            left = [*masks[:head], masks[head] & ~(1 << rank), *masks[head + 1 :]]
            # A head always has a rank, and a rank a head.
            if left[head] != masks[head] and any(mask >> rank & 1 for mask in left):
                found = self.best_addition(left, range(len(masks)) if left[head] else [head])
                if found is not None and found[0] < best[0]:
                    best = found
        return best


def place_for_requests(
    mapping: LayerMapping, weights: Sequence[float], requests: ArrayLike, limits: CopyLimits, *, fixed: float = 0.0
) -> LayerMapping:
    """Place the replicas of a layer on at most 8 ranks so that requests unlike the profile find those that they need.

    `mapping` is the best for the profile's budgets `weights`; `requests` ``[requests, heads]`` are those of single
    prompts, if there are any. A replica takes `fixed` beside its part. The mapping is improved by one replica more,
    then by one elsewhere, until neither helps. The slowest rank under the profile's own budgets does not become slower.
    """
    size = limits.tp_size
    if size > MOST_RANKS or sum(weights) <= 0:
        return mapping
    rows = np.vstack([weights, np.reshape(np.asarray(requests, dtype=np.float64), (-1, len(weights)))])
    judge = _Requests(rows, limits, PROFILE_WEIGHT * len(rows), fixed)
    masks = [mask_of(held) for held in mapping.ranks]
    value = judge.value(masks)
    for _ in range(limits.copies - mapping.copies):
        addition = judge.best_addition(masks, range(len(masks)))
        if addition is not None and addition[0] <= value * (1 + TOLERANCE):
            value, masks = addition
    for _ in range(ROUNDS if len(weights) <= MANY_HEADS else 0):
        reached, changed = judge.best_exchange(masks)
        if reached >= value * (1 - TOLERANCE):
            break
        value, masks = reached, changed
    ranks = [[rank for rank in range(size) if mask >> rank & 1] for mask in masks]
    slowest, parts = split_heads(weights, ranks, size, fixed=fixed)
    if slowest > split_heads(weights, mapping.ranks, size, fixed=fixed)[0] * (1 + TOLERANCE):
        return mapping
    return LayerMapping.even(ranks).with_shares(parts)
