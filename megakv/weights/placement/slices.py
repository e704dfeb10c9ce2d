"""What a rank keeps of one parameter: index ranges along one dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megakv.base.errors import CombinationError

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SliceSpec:
    """A rank's part of a parameter: index ranges along `dim`, in the order in which the local tensor holds them.

    None for `ranges` keeps everything. With `zero` it is the whole shape, filled with zeros and never read: another
    rank adds the value to the sum.
    """

    dim: int = 0
    ranges: Ranges | None = None
    zero: bool = False

    @property
    def size(self) -> int:
        """Kept indices along `dim`."""
        assert self.ranges is not None
        return sum(stop - start for start, stop in self.ranges)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Local shape of a parameter of shape `whole`."""
        if self.ranges is None:
            return tuple(whole)
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def take(self, tensor: Tensor) -> Tensor:
        """The part of `tensor`; a view where one range suffices."""
        if self.zero:
            return torch.zeros_like(tensor)
        if self.ranges is None:
            return tensor
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)


WHOLE = SliceSpec()


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same indices with touching ranges made one."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def blocks(indices: Iterable[int], width: int, offset: int = 0) -> Ranges:
    """Ranges of blocks number `indices`, each `width` wide, in a table that begins at `offset`."""
    return joined((offset + index * width, offset + (index + 1) * width) for index in indices)


def split_width(width: int, parts: int, part: int, multiples: Sequence[int] = ()) -> tuple[int, int]:
    """The range of `part` when an MLP's `width` is divided; the remainder goes to the first ranks.

    Ranges begin at the first of the `multiples` that the width allows, else at multiples of 8 where it allows that:
    grouped matrix products want rows aligned to 16 bytes.
    """
    if width < parts:
        raise CombinationError(
            "whole",
            f"tensor_parallel.tp_size = {parts} is more than an MLP width of {width}; use {width} or less",
        )
    unit = next(u for u in (*multiples, 8, 4, 2, 1) if width % u == 0 and width >= u * parts)
    share, remainder = divmod(width // unit, parts)
    start = part * share + min(part, remainder)
    stop = start + share + (part < remainder)
    return start * unit, stop * unit
