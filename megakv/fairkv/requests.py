"""Placements for requests unlike the profile: where copies go that the profile itself has no use for.

R - 1 copies make all ranks equal for the budgets of the profile, wherever they go; a request has other budgets, and its
own split (`megakv.fairkv.splitting`) can only use the replicas that there are. So copies are placed for many requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megakv.fairkv.assignment import TOLERANCE
from megakv.fairkv.fair_copying import CopyLimits
from megakv.fairkv.layer import LayerMapping
from megakv.fairkv.splitting import RankSets, split_heads

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


class _Placement:
    """Ranks of every head as a mask, and how slow the slowest is for each request under its own best split."""

    def __init__(self, ranks: Sequence[Sequence[int]], requests: NDArray[np.float64], limits: CopyLimits, first: float):
        self.limits, self.size = limits, limits.tp_size
        self.masks = [sum(1 << rank for rank in held) for held in ranks]
        mean = requests.sum(axis=1) / self.size
        # Relative to the mean load, so that a value of 1 is perfect; requests without any tokens do not count.
        self.requests = requests[mean > 0] / mean[mean > 0, None]
        self.importance = np.append(first, np.ones(len(self.requests) - 1))
        sets = RankSets(self.size)
        # [masks, sets]: what a head there adds to the bound of every set of ranks, which `held` [sets, requests] sums.
        self.inside = np.stack([sets.inside(self.members(mask)) for mask in range(1 << self.size)])
        self.held = np.sum([np.outer(self.inside[m], self.requests[:, h]) for h, m in enumerate(self.masks)], axis=0)

    def members(self, mask: int) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if mask >> rank & 1)

    @property
    def value(self) -> float:
        return float((self.held.max(axis=0) * self.importance).sum())

    def set(self, head: int, mask: int) -> None:
        self.held = self.held + np.outer(self.inside[mask] - self.inside[self.masks[head]], self.requests[:, head])
        self.masks[head] = mask

    def best_addition(self, heads: Iterable[int]) -> tuple[float, int, int] | None:
        """Value, head and mask of the best further replica within the limits."""
        best: tuple[float, int, int] | None = None
        counts = [mask.bit_count() for mask in self.masks]
        for head in heads:
            if not self.limits.allow([count + (other == head) for other, count in enumerate(counts)]):
                continue
            now = self.masks[head]
            masks = [now | 1 << rank for rank in range(self.size) if not now >> rank & 1]
            change = self.inside[masks] - self.inside[now]
            trial = self.held[None] + change[:, :, None] * self.requests[None, None, :, head]
            values = (trial.max(axis=1) * self.importance).sum(axis=1)
            if len(values) and (best is None or values.min() < best[0] * (1 - TOLERANCE)):
                best = (float(values.min()), head, masks[int(values.argmin())])
        return best

    def exchange(self) -> bool:
        """Take the replica away without which, and with another one instead, all is best; False if nothing helps."""
        best, step = self.value * (1 - TOLERANCE), None
        for head, mask in enumerate(list(self.masks)):
            for rank in self.members(mask):
                left = mask & ~(1 << rank)
                self.set(head, left)
                # A head always has a rank, and a rank a head.
                if any(other >> rank & 1 for other in self.masks):
                    addition = self.best_addition(range(len(self.masks)) if left else [head])
                    if addition is not None and addition[0] < best:
                        best, step = addition[0], (head, left, *addition[1:])
                self.set(head, mask)
        if step is None:
            return False
        self.set(step[0], step[1])
        self.set(step[2], step[3])
        return True


def place_for_requests(
    mapping: LayerMapping,
    weights: Sequence[float],
    requests: ArrayLike,
    limits: CopyLimits,
    *,
    keep_profile: bool = True,
) -> LayerMapping:
    """Place the replicas of a layer on at most 8 ranks so that requests unlike the profile find those that they need.

    `mapping` is the best for the profile's budgets `weights`; `requests` ``[requests, heads]`` are those of single
    prompts. It is improved by one replica more, then by one elsewhere, until neither helps. With `keep_profile` the
    slowest rank under the profile's own budgets does not become slower; else those count as little as a request's.
    """
    size = limits.tp_size
    if size > MOST_RANKS or sum(weights) <= 0:
        return mapping
    rows = np.vstack([np.asarray(weights, dtype=np.float64), np.asarray(requests, dtype=np.float64)])
    placement = _Placement(mapping.ranks, rows, limits, PROFILE_WEIGHT * len(rows) if keep_profile else 1.0)
    for _ in range(limits.copies - mapping.copies):
        addition = placement.best_addition(range(len(weights)))
        if addition is None:
            break
        placement.set(*addition[1:])
    for _ in range(ROUNDS if len(weights) <= MANY_HEADS else 0):
        if not placement.exchange():
            break
    ranks = list(map(placement.members, placement.masks))
    slowest, parts = split_heads(weights, ranks, size)
    if keep_profile and slowest > max(mapping.loads(weights, size)) * (1 + TOLERANCE):
        return mapping
    return LayerMapping.even(ranks).with_shares(parts)
