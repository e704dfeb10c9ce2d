"""Parts of matrices in a GGUF file, packed or as numbers, in the order of the model's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megakv.base.errors import MegaKVError
from megakv.weights.blocks import BLOCKS
from megakv.weights.gguf_file import StoredTensor, unpacked
from megakv.weights.placement.slices import Ranges

CHUNK = 8 << 20
"""Stored bytes that are read at a time where only some columns of them are kept."""
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q6_K": (208,)}
HALVES |= dict.fromkeys(("Q4_K", "Q5_K"), (0, 2))
"""Where scales and offsets in float16 lie in blocks."""


class StoredRows:
    """A matrix of a file whose rows the model has in another `order`, read by parts: packed, or as numbers."""

    def __init__(self, tensor: StoredTensor, order: Tensor, *, packed: bool):
        self.tensor, self.packed, self.bytes_read = tensor, packed, 0
        self._order = None if torch.equal(order, torch.arange(len(order))) else order

    def read(self, dim: int, ranges: Ranges) -> Tensor:
        """Ranges of rows, or of columns, which are whole blocks of packed ones."""
        if dim == 0:
            parts = [self._rows(*ends) for ends in ranges]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        step, parts = max(1, CHUNK // self.tensor.row_bytes), []
        ranges = block_ranges(self.tensor.kind, ranges) if self.packed else ranges
        for start in range(0, self.tensor.rows, step):
            rows = self._rows(start, min(start + step, self.tensor.rows))
            # Not a view, which would hold all that was read.
            parts.append(torch.cat([rows[:, a:b] for a, b in ranges], dim=1))
        return torch.cat(parts)

    def _rows(self, start: int, stop: int) -> Tensor:
        first, last, here = start, stop, None
        if self._order is not None:
            here = self._order[start:stop]
            first, last = int(here.min()), int(here.max()) + 1
        rows = self.tensor.read(first, last)
        self.bytes_read += rows.nbytes
        check_scales(self.tensor, rows)
        rows = rows if self.packed else unpacked(self.tensor, rows)
        return rows if here is None else rows[here - first]


def check_scales(tensor: StoredTensor, rows: Tensor) -> None:
    """Refuse blocks whose scales are no numbers: all that is multiplied with them would be none."""
    for first in HALVES.get(tensor.kind, ()):
        halves = rows.view(-1, BLOCKS[tensor.kind].bytes)[:, first : first + 2].contiguous().view(torch.float16)
        if not bool(halves.isfinite().all()):
            raise MegaKVError(
                f"{tensor.file}: {tensor.name} ({tensor.kind}) has scales that are no finite numbers; fetch it again"
            )


def block_ranges(kind: str, ranges: Ranges) -> Ranges:
    """Bytes of a row that ranges of its weights lie in, which are whole blocks."""
    block = BLOCKS[kind]
    return tuple((a // block.elements * block.bytes, b // block.elements * block.bytes) for a, b in ranges)


class StoredExperts:
    """Matrices of all experts ``[E, rows, columns]``, packed; those of several tensors are joined along their rows."""

    def __init__(self, tensors: Sequence[StoredTensor]):
        self.kind, self.bytes_read = tensors[0].kind, 0
        self._tensors = tensors
        self._experts, *_ = tensors[0].shape

    def read(self, dim: int, ranges: Ranges) -> Tensor:
        """Ranges of each expert's rows, or of columns, which are whole blocks: ``[E, rows, row bytes]``."""
        return torch.stack([self._read_one(expert, dim, ranges) for expert in range(self._experts)])

    def whole(self) -> Tensor:
        """All of it."""
        return self.read(1, ((0, sum(tensor.shape[1] for tensor in self._tensors)),))

    def _read_one(self, expert: int, dim: int, ranges: Ranges) -> Tensor:
        parts = []
        if dim == 2:
            inside = block_ranges(self.kind, ranges)
            for tensor in self._tensors:
                rows = self._rows(tensor, expert, 0, tensor.shape[1])
                parts.append(torch.cat([rows[:, a:b] for a, b in inside], dim=1))
            return torch.cat(parts)
        for start, stop in ranges:
            begin = 0
            for tensor in self._tensors:
                low, high = max(start - begin, 0), min(stop - begin, tensor.shape[1])
                if low < high:
                    parts.append(self._rows(tensor, expert, low, high))
                begin += tensor.shape[1]
        return torch.cat(parts)

    def _rows(self, tensor: StoredTensor, expert: int, low: int, high: int) -> Tensor:
        first = expert * tensor.shape[1]
        rows = tensor.read(first + low, first + high)
        self.bytes_read += rows.nbytes
        check_scales(tensor, rows)
        return rows
