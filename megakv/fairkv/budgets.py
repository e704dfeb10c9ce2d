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

    Parameters
    ----------
    floors : IntArray
        ``[K]`` tokens that every head keeps for certain: its own highest scored ones.
    total : int
        Tokens of all heads together. What the floors leave goes to the highest scored tokens of any head.
    """

    floors: IntArray
    total: int

    def __post_init__(self) -> None:
        assert (self.floors >= 0).all() and self.floors.sum() <= self.total


def is_compressed(budget: float, min_tokens: int, length: IntArray) -> npt.NDArray[np.bool_]:
    """Which sequences of `length` new tokens are compressed: long ones that have more tokens than they may keep.

    A budget of 1, a fraction that keeps everything, is taken as it is.
    """
    return (length >= min_tokens) & ((budget <= 1) | (length > budget))


def tokens_per_head(budget: float, length: int, least: int) -> int:
    """Tokens that a head keeps on average of a sequence.

    Parameters
    ----------
    budget : float
        Up to 1 a fraction of the sequence's tokens, above 1 their number.
    length : int
        Tokens of the sequence.
    least : int
        Tokens that are kept in any case.
    """
    wanted = round(budget * length) if budget <= 1 else int(budget)
    return min(length, max(wanted, least))


def equal(tokens: int, kv_heads: int) -> HeadBudgets:
    """The same for every head."""
    return HeadBudgets(np.full(kv_heads, tokens, dtype=np.int64), tokens * kv_heads)


def shared(tokens: int, kv_heads: int, safeguard: float, least: int) -> HeadBudgets:
    """One pool for all heads of the layer (Ada-KV, Algorithm 1), but no head below a safeguard.

    Parameters
    ----------
    tokens : int
        Mean tokens per head.
    kv_heads : int
    safeguard : float
        Fraction of what `least` leaves of `tokens` that every head keeps.
    least : int
        Tokens that every head keeps in any case, the observation window; at most `tokens`.
    """
    floor = least + int(safeguard * (tokens - least))
    return HeadBudgets(np.full(kv_heads, floor, dtype=np.int64), tokens * kv_heads)


def pyramid(tokens: int, layer: int, layers: int, *, length: int, least: int, decay: float) -> int:
    """Tokens per head of a layer, falling linearly from the first layer to the last (PyramidKV, Section 4.2).

    Parameters
    ----------
    tokens : int
        Mean over the layers.
    layer, layers : int
    length : int
        Tokens of the sequence, which no layer can exceed.
    least : int
        Tokens that are kept in any case, the observation window; only what is beyond them falls.
    decay : float
        The last layer keeps the mean over this.
    """
    mean, room = max(tokens - least, 0), max(length - least, 0)
    first = min(2 * mean - mean / decay, float(room))
    last = 2 * mean - first
    # Rounding the sums, not the terms, keeps the mean exact.
    steps = np.linspace(first, last, layers) if layers > 1 else np.array([float(mean)])
    ends = np.floor(np.cumsum(steps) + 0.5).astype(np.int64)
    return min(length, least + int(ends[layer] - (ends[layer - 1] if layer else 0)))


def weighted(tokens: int, weights: FloatArray, *, length: int, least: int, spread: float) -> IntArray:
    """Fixed budgets of all heads of all layers by their importance (HeadKV, Section 3.2).

    Every head keeps a base; the rest of all bases is one pool that is divided by importance.

    Parameters
    ----------
    tokens : int
        Mean tokens per head.
    weights : FloatArray
        ``[layers, K]`` importance, not negative and not all zero.
    length : int
        Tokens of the sequence; what a head cannot use goes to the others.
    least : int
        Tokens that every head keeps in any case.
    spread : float
        Beta of the paper, at least 1: the pool holds ``1 / spread`` of all tokens.

    Returns
    -------
    IntArray
        ``[layers, K]``, which sums to ``tokens * layers * K``.
    """
    base = min(tokens, max(least, round(tokens * (1.0 - 1.0 / spread))))
    pool = (tokens - base) * weights.size
    extra = divide(pool, weights.reshape(-1), most=length - base)
    return (base + extra).reshape(weights.shape)


def divide(total: int, weights: Sequence[float] | FloatArray, most: int) -> IntArray:
    """Divide a number in proportion to weights, no share above `most`, rounded so that the sum is right.

    `total` must be at most ``most * len(weights)``. Where all weights of those with room are zero, they share alike.
    """
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
