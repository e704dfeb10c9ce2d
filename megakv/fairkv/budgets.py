"""How many tokens the KV heads of a layer keep of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakv.distributed.sharding import IntArray

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HeadBudgets:
    """What the KV heads of one layer, over all ranks, keep of one sequence.

    Every head keeps its own ``floors[head]`` highest scored tokens for certain; what these leave of `total` goes to the
    highest scored tokens of any head.
    """

    floors: IntArray
    total: int

    def __post_init__(self) -> None:
        assert (self.floors >= 0).all() and self.floors.sum() <= self.total


def is_compressed(budget: float, min_tokens: int, length: IntArray) -> npt.NDArray[np.bool_]:
    """Which sequences of `length` new tokens are compressed: long ones that have more tokens than they may keep."""
    return (length >= min_tokens) & ((budget <= 1) | (length > budget))


def tokens_per_head(budget: float, length: int, least: int) -> int:
    """Tokens that a head keeps on average of a sequence of `length`, `least` in any case."""
    wanted = round(budget * length) if budget <= 1 else int(budget)
    return min(length, max(wanted, least))


def equal(tokens: int, kv_heads: int) -> HeadBudgets:
    return HeadBudgets(np.full(kv_heads, tokens, dtype=np.int64), tokens * kv_heads)


def shared(tokens: int, kv_heads: int, safeguard: float, least: int) -> HeadBudgets:
    """One pool for all heads of the layer (Ada-KV, Algorithm 1), but no head below `least`, the observation window, and
    the fraction `safeguard` of what that leaves of the mean `tokens`.
    """
    floor = least + int(safeguard * (tokens - least))
    return HeadBudgets(np.full(kv_heads, floor, dtype=np.int64), tokens * kv_heads)


def pyramid(tokens: int, layer: int, layers: int, *, length: int, least: int, decay: float) -> int:
    """Tokens per head of a layer, falling linearly from the first layer to the last (PyramidKV, Section 4.2).

    Of `tokens`, the mean over layers, only what is beyond `least`, the window, falls; the last layer keeps the mean of
    that over `decay`.
    """
    mean, room = max(tokens - least, 0), max(length - least, 0)
    first = min(2 * mean - mean / decay, float(room))
    last = 2 * mean - first
    # Rounding the sums, not the terms, keeps the mean exact.
    steps = np.linspace(first, last, layers) if layers > 1 else np.array([float(mean)])
    ends = np.floor(np.cumsum(steps) + 0.5).astype(np.int64)
    return min(length, least + int(ends[layer] - (ends[layer - 1] if layer else 0)))


def weighted(tokens: int, weights: FloatArray, *, length: int, least: int, spread: float) -> IntArray:
    """``[layers, K]`` fixed budgets of all heads by their importance (HeadKV, Section 3.2), with a mean of `tokens`.

    Every head keeps a base, `least` at least; the rest of all bases, ``1 / spread`` of all tokens (the paper's beta),
    is one pool that is divided by the importances ``[layers, K]``. What a head cannot use of `length` goes to the
    others.
    """
    base = min(tokens, max(least, round(tokens * (1.0 - 1.0 / spread))))
    pool = (tokens - base) * weights.size
    extra = divide(pool, weights.reshape(-1), most=length - base)
    return (base + extra).reshape(weights.shape)


def divide(total: int, weights: Sequence[float] | FloatArray, most: int) -> IntArray:
    """Divide at most ``most * len(weights)`` in proportion to weights, no share above `most`, the sum exact."""
    weight = np.asarray(weights, dtype=np.float64)
    shares = np.zeros(len(weight))
    full = np.zeros(len(weight), dtype=bool)
    while True:
        free = ~full
        left = total - most * int(full.sum())
        of_free = weight * free
        of_free = of_free if of_free.sum() > 0 else free.astype(np.float64)
        shares = np.where(full, most, left * of_free / max(of_free.sum(), 1e-300))
        beyond = free & (shares > most)
        if not beyond.any():
            break
        full |= beyond
    result = np.floor(shares).astype(np.int64)
    missing = total - int(result.sum())
    # Largest remainders first, ties by index; a share that is full has no remainder.
    order = np.argsort(-(shares - result), kind="stable")
    order = order[result[order] < most]
    result[order[:missing]] += 1
    assert result.sum() == total
    return result
