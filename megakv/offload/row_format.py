"""What a token's row in one layer is made of, on the accelerator and off it: keys of all heads, then their values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megakv.offload.config import OffloadConfig
from megakv.offload.quantization import GroupQuantiser, group_size


class HeadShape(NamedTuple):
    """KV heads of a layer, and head dimensions of keys and values."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.heads * (self.key_dim + self.value_dim)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[n, W]`` as keys ``[K, n, D]`` and values ``[K, n, Dv]``: views."""
        count, (step, inner), first = rows.shape[0], rows.stride(), rows.storage_offset()
        # One call each, as every sequence asks in every layer of every step.
        keys = rows.as_strided((self.heads, count, self.key_dim), (self.key_dim * inner, step, inner), first)
        first += self.heads * self.key_dim * inner
        values = rows.as_strided((self.heads, count, self.value_dim), (self.value_dim * inner, step, inner), first)
        return keys, values


class RowFormat:
    """The format of a layer's rows: known from the first ones on."""

    def __init__(self, config: OffloadConfig):
        self._config = config
        self._shape: HeadShape | None = None
        self._dtype: torch.dtype | None = None
        self._quantiser: GroupQuantiser | None = None

    def rows_of(self, k_KSD: Tensor, v_KSD: Tensor) -> Tensor:
        """Keys and values as rows ``[n, W]``; their format is that of all rows."""
        self._shape = HeadShape(k_KSD.shape[0], k_KSD.shape[2], v_KSD.shape[2])
        self._dtype = k_KSD.dtype
        return torch.cat((k_KSD.transpose(0, 1).flatten(1), v_KSD.transpose(0, 1).flatten(1)), dim=1)

    def take_format(self, other: RowFormat) -> None:
        self._shape, self._dtype = other._shape, other._dtype

    @property
    def head_shape(self) -> HeadShape:
        assert self._shape is not None
        return self._shape

    def heads_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, W]`` rows as keys ``[K, n, D]`` and values ``[K, n, Dv]``: views."""
        return self.head_shape.split(rows)

    @property
    def dtype(self) -> torch.dtype:
        assert self._dtype is not None
        return self._dtype

    @property
    def row_width(self) -> int:
        """Elements of a token's keys and values."""
        return self.head_shape.width

    @property
    def quantiser(self) -> GroupQuantiser | None:
        """What rows are packed with off the accelerator; None where they keep their type."""
        if self._config.kv_bits is None:
            return None
        if self._quantiser is None:
            group = group_size(self.head_shape.key_dim, self.head_shape.value_dim, self._config.kv_group)
            self._quantiser = GroupQuantiser(self.row_width, group, self.dtype)
        return self._quantiser

    def unpacked(self, stored: Tensor) -> Tensor:
        """Rows ``[n, W]`` of rows as they lie off the accelerator."""
        if self.quantiser is None:
            return stored
        rows = torch.empty((len(stored), self.row_width), dtype=self.dtype, device=stored.device)
        self.quantiser.unpack(stored, rows)
        return rows

    @property
    def stored_width(self) -> int:
        """Elements of a token's row off the accelerator."""
        return self.row_width if self.quantiser is None else self.quantiser.nbytes

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the rows off the accelerator."""
        return self.dtype if self.quantiser is None else torch.uint8

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's keys and values off the accelerator."""
        return self.stored_width * self.stored_dtype.itemsize
