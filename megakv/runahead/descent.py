"""Descents over partitions: tokens are moved between ranks, a stride at a time, while that is faster."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from megakv.base.partition import Partition

ALL_PAIRS = 6
"""Up to so many ranks, tokens are moved between any two at once, not only between neighbours."""
TRIPLES = range(5, ALL_PAIRS + 1)
"""Ranks of which three take part in a move: of 5, one chain in 40 ends over 1% above the best without; of 4, none."""


def pairs(size: int, stride: int) -> list[Partition]:
    """Moves of a stride of tokens from one rank to another, nearest ranks first."""
    found = []
    for giver, taker in sorted(itertools.permutations(range(size), 2), key=lambda pair: abs(pair[0] - pair[1])):
        if size <= ALL_PAIRS or abs(giver - taker) == 1:
            found.append(tuple(stride * ((rank == taker) - (rank == giver)) for rank in range(size)))
    return found


def spreads(size: int, stride: int) -> list[Partition]:
    """Moves from one rank to all others alike, and from all others to one: along ridges where no pair gains."""
    return [
        tuple(stride * sign * ((size - 1) * (rank == one) - (rank != one)) for rank in range(size))
        for one in range(size)
        for sign in (1, -1)
    ]


def triples(size: int, stride: int) -> list[Partition]:
    """Moves of a stride each from one rank to two others, or from two to one, where other moves leave too many out."""
    return [
        tuple(stride * sign * (2 * (rank == one) - (rank in others)) for rank in range(size))
        for one in range(size if size in TRIPLES else 0)
        for others in itertools.combinations([rank for rank in range(size) if rank != one], 2)
        for sign in (1, -1)
    ]


def descend(
    best: Partition,
    seconds: Callable[[Partition], float],
    moves: Sequence[Partition],
    *,
    least: int = 0,
    ends: Callable[[int], bool] = lambda left: left == 0,
) -> Partition:
    """The end of taking moves while they are faster; the one that was is tried again first.

    least: tokens that no rank falls below.
    ends: is told how many moves in turn are still to fail, and says whether that is enough.
    """
    waiting, failed = deque(moves), 0
    while not ends(len(waiting) - failed):
        moved = tuple(own + more for own, more in zip(best, waiting[0], strict=True))
        possible = all(new >= min(least, old) for new, old in zip(moved, best, strict=True))
        if possible and seconds(moved) < seconds(best):
            best, failed = moved, 0
        else:
            waiting.rotate(-1)
            failed += 1
    return best
