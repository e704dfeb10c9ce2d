"""Partitions of a prompt: how many consecutive tokens each link of the chain computes (KV-Runahead, Section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megakv.base.errors import CombinationError

Partition = tuple[int, ...]
"""Tokens of each context-parallel rank, rank 0 first; rank 0 has the start of the prompt."""

SETTING = "megakv.runahead.partition"
TOLERANCE = 1e-6
"""How far the sum of fractions may be from 1."""


def even(tokens: int, size: int) -> Partition:
    """Parts that differ by at most one token, longer ones first: KVR-E of the paper."""
    part, more = divmod(tokens, size)
    return tuple(part + (rank < more) for rank in range(size))


def from_fractions(fractions: Sequence[float], tokens: int) -> Partition:
    """The whole tokens nearest to the shares of a prompt, by largest remainder; only their ratios count."""
    whole = math.fsum(fractions)
    exact = [fraction / whole * tokens for fraction in fractions]
    parts = [math.floor(share) for share in exact]
    # Ties go to the earlier rank, so that all ranks agree.
    by_remainder = sorted(range(len(parts)), key=lambda rank: parts[rank] - exact[rank])
    for rank in by_remainder[: tokens - sum(parts)]:
        parts[rank] += 1
    return tuple(parts)


def to_fractions(partition: Sequence[int]) -> tuple[float, ...]:
    """The share of each rank."""
    whole = sum(partition)
    return tuple(part / whole for part in partition)


def check_partition(partition: Sequence[float], size: int, *, setting: str = SETTING) -> bool:
    """Refuse numbers that partition no prompt over `size` ranks.

    Returns True for fractions, False for token counts, whose sum only a prompt can prove.
    """
    given = f"{setting} = {list(partition)}"
    if len(partition) != size:
        raise CombinationError(
            "whole",
            f"{given} has {len(partition)} parts: allowed: {size}, one for each of the {size} context-parallel ranks",
        )
    numbers = [part for part in partition if isinstance(part, int | float) and not isinstance(part, bool)]
    if len(numbers) < size or not all(0 <= part < math.inf for part in numbers):
        raise ValueError(f"{given}: allowed: numbers of 0 or more")
    total = math.fsum(numbers)
    if abs(total - 1) <= TOLERANCE:
        return True
    if all(isinstance(part, int) for part in partition) and total > 0:
        return False
    raise ValueError(
        f"{given} sums to {total:g}: allowed: fractions that sum to 1, or whole token counts that sum to the prompt"
    )


def explicit(partition: Sequence[float], tokens: int, size: int) -> Partition:
    """A user's partition of so many new tokens: fractions that sum to 1, or whole counts that sum to the tokens."""
    if check_partition(partition, size):
        return from_fractions(partition, tokens)
    if sum(partition) != tokens:
        raise ValueError(
            f"{SETTING} = {list(partition)} sums to {sum(partition)} tokens, but a sequence of the prompt has {tokens} "
            "new ones: allowed: counts that sum to it, or fractions that sum to 1, which fit every prompt"
        )
    return tuple(int(part) for part in partition)
