"""Runs of rows of one length, at one distance from each other: one tensor for all of them, and one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor


def alike(first: Sequence[int], count: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of consecutive runs that are alike, given the first row of each and how many it has."""
    begin = 0
    for index in range(1, len(first)):
        step = first[index] - first[index - 1]
        if count[index] != count[begin] or step != first[begin + 1] - first[begin] or step <= 0:
            yield begin, index
            begin = index
    yield begin, len(first)


def stacked(rows_KRD: Tensor, first: Sequence[int], count: int) -> Tensor:
    """``[B, K, S, D]`` view of `B` alike runs of `S` rows of ``[K, R, D]``."""
    head, row, inner = rows_KRD.stride()
    step = row * (first[1] - first[0]) if len(first) > 1 else 0
    shape = (len(first), rows_KRD.shape[0], count, rows_KRD.shape[2])
    return rows_KRD.as_strided(shape, (step, head, row, inner), rows_KRD.storage_offset() + row * first[0])
