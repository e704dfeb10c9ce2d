"""What a token's row in one layer is made of, on the accelerator and off it."""

from __future__ import annotations

import torch
from torch import Tensor

from megakv.offload.config import OffloadConfig
from megakv.offload.heads import HeadShape
from megakv.offload.quantization import GroupQuantiser, group_size


class RowFormat:
    """The format of rows: known from the first ones on.

    Parameters
    ----------
    config : OffloadConfig
    """

    def __init__(self, config: OffloadConfig):
        self._config = config
        self._shape: HeadShape | None = None
        self._dtype: torch.dtype | None = None
        self._quantiser: GroupQuantiser | None = None

    def learn_format(self, k_KLD: Tensor, v_KLD: Tensor) -> None:
        """That of these keys and values."""
        self._shape, self._dtype = HeadShape.of(k_KLD, v_KLD), k_KLD.dtype

    def take_format(self, other: RowFormat) -> None:
        """That of other rows."""
        self._shape, self._dtype = other._shape, other._dtype

    @property
    def head_shape(self) -> HeadShape:
        """What a row is made of."""
        assert self._shape is not None
        return self._shape

    def heads_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, W]`` rows as keys ``[K, n, D]`` and values ``[K, n, Dv]``: views."""
        return self.head_shape.split(rows)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows."""
        assert self._dtype is not None
        return self._dtype

    @property
    def row_width(self) -> int:
        """Elements of a token's keys and values."""
        return self.head_shape.width

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's keys and values off the accelerator."""
        return self.stored_width * self.stored_dtype.itemsize

    @property
    def quantiser(self) -> GroupQuantiser | None:
        """What rows are packed with off the accelerator; None where they keep their type."""
        asked = self._config
        if asked.kv_bits is None:
            return None
        if self._quantiser is None:
            group = group_size(self.head_shape.key_dim, self.head_shape.value_dim, asked.kv_group)
            self._quantiser = GroupQuantiser(self.row_width, group, self.dtype)
        return self._quantiser

    @property
    def stored_width(self) -> int:
        """Elements of a token's row off the accelerator."""
        return self.row_width if self.quantiser is None else self.quantiser.nbytes

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the rows off the accelerator."""
        return self.dtype if self.quantiser is None else torch.uint8
