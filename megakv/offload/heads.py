"""A token's row: the keys of all its heads, then their values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HeadShape(NamedTuple):
    """KV heads of a layer, and head dimensions of keys and values."""

    heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, k_KSD: Tensor, v_KSD: Tensor) -> HeadShape:
        """That of keys ``[K, n, D]`` and values ``[K, n, Dv]``."""
        return cls(k_KSD.shape[0], k_KSD.shape[2], v_KSD.shape[2])

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.heads * (self.key_dim + self.value_dim)

    @staticmethod
    def joined(k_KSD: Tensor, v_KSD: Tensor) -> Tensor:
        """Keys and values as rows ``[n, W]``."""
        return torch.cat((k_KSD.transpose(0, 1).flatten(1), v_KSD.transpose(0, 1).flatten(1)), dim=1)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[n, W]`` as keys ``[K, n, D]`` and values ``[K, n, Dv]``: views."""
        count, (step, inner), first = rows.shape[0], rows.stride(), rows.storage_offset()
        # One call each, as every sequence asks in every layer of every step.
        keys = rows.as_strided((self.heads, count, self.key_dim), (self.key_dim * inner, step, inner), first)
        first += self.heads * self.key_dim * inner
        values = rows.as_strided((self.heads, count, self.value_dim), (self.value_dim * inner, step, inner), first)
        return keys, values
