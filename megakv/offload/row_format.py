"""What a token's row in one layer is made of: keys of all heads, then their values; off the accelerator, in few bits.

Four bits (KVPR, Section 4.4; FlexGen) or eight are lossy, and off unless asked for. Each head's key, and each head's
value, is cut along the head dimension into groups, as in FlexGen. A group keeps its smallest value and a step, of which
there are fifteen, or 255, up to its largest; every element becomes the nearest of sixteen, or 256. What comes back
comes back again if it is packed once more, so a token that is written several times is rounded once.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megakv.attention.compiled import Packing
from megakv.costmodel.stored_rows import group_size, packed_bytes
from megakv.offload.config import OffloadConfig


class GroupQuantiser:
    """Rows of a width and a type, in four or eight bits with a step and a smallest value for each group of elements.

    Steps and smallest values are float16 for rows in float16, and float32 otherwise. A value differs from what comes
    back for it by at most half a step, and by what rounding those two to their type costs. What came back once
    comes back again.
    """

    def __init__(self, width: int, group: int, dtype: torch.dtype, bits: int = 4):
        self.nbytes = packed_bytes(width, group, dtype, bits)
        halves = dtype == torch.float16
        self.packing = Packing(bits, group, width, int(halves))
        self._group, self._dtype, self._scale_dtype = group, dtype, torch.float16 if halves else torch.float32
        self._levels, self._bytes = (1 << bits) - 1, -(-width * bits // 8)

    def pack(self, rows: Tensor) -> Tensor:
        """``[n, W]`` rows as ``[n, nbytes]`` bytes: one or two elements in each, then steps, then smallest values."""
        groups = rows.float().unflatten(1, (-1, self._group))
        low, high = groups.aminmax(dim=2, keepdim=True)
        step = self._step(high - low)
        # The step is that of the largest value that comes back.
        high = (low + step * self._nearest(high - low, step)).to(self._dtype).float()
        step = self._step(high - low)
        levels = self._nearest(groups - low, step).to(torch.uint8).flatten(1)
        if self.packing.bits == 4:
            levels = functional.pad(levels, (0, levels.shape[1] % 2))
            levels = levels[:, 0::2] | levels[:, 1::2] << 4
        scales = torch.cat((step, low), dim=1).squeeze(2).to(self._scale_dtype)
        return torch.cat((levels, scales.view(torch.uint8)), dim=1)

    def _step(self, spread: Tensor) -> Tensor:
        """The step of groups, given how far their largest value is from their smallest.

        Of float32's 24 significant bits the first 16 are kept: any level times a step is exact then, so that all
        processors unpack to the same values, and rounding in float32 does not turn a step into another one.
        """
        step = spread / self._levels
        if self._scale_dtype == torch.float16:
            return step.half().float()
        return (step.view(torch.int32) + 0x80).bitwise_and_(-0x100).view(torch.float32)

    def _nearest(self, above: Tensor, step: Tensor) -> Tensor:
        """The nearest levels to values so far above the smallest one."""
        inverse = torch.where(step > 0, step.reciprocal(), 0.0)
        return (above * inverse).round_().clamp_(0, self._levels)

    def unpack(self, packed: Tensor, *columns: Tensor) -> None:
        """Write the rows that ``[n, nbytes]`` bytes stand for to ``[..., W]``, or each one's columns to their place."""
        # A copy, as where scales lie in a row they may not be aligned.
        levels, scales = packed[:, : self._bytes], packed[:, self._bytes :].clone(memory_format=torch.contiguous_format)
        step, low = scales.view(self._scale_dtype).float().chunk(2, dim=1)
        if self.packing.bits == 4:
            levels = torch.stack((levels & 15, levels >> 4), dim=2).flatten(1)[:, : self.packing.width]
        levels = levels.unflatten(1, (-1, self._group))
        rows = torch.addcmul(low.unsqueeze(2), levels.float(), step.unsqueeze(2)).flatten(1)
        for own, found in zip(columns, rows.split([own.shape[-1] for own in columns], dim=1), strict=True):
            own.copy_(found.unflatten(0, own.shape[:-1]))


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
    """The format of a layer's rows: `head_shape` and `dtype` are known from the first ones on."""

    head_shape: HeadShape
    dtype: torch.dtype

    def __init__(self, config: OffloadConfig):
        self._config = config

    def take_format_of(self, other: RowFormat) -> None:
        """Learn it from other rows, if it is known there."""
        vars(self).update({name: known for name, known in vars(other).items() if name in ("head_shape", "dtype")})

    @property
    def known(self) -> bool:
        """Whether there have been any rows."""
        return "dtype" in vars(self)

    def rows_of(self, k_KSD: Tensor, v_KSD: Tensor) -> Tensor:
        """Keys and values as rows ``[n, W]``; their format is that of all rows."""
        self.set_format(k_KSD, v_KSD)
        return torch.cat((k_KSD.transpose(0, 1).flatten(1), v_KSD.transpose(0, 1).flatten(1)), dim=1)

    def set_format(self, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """Take the format of keys and values, of which there may be none."""
        self.head_shape, self.dtype = HeadShape(k_KSD.shape[0], k_KSD.shape[2], v_KSD.shape[2]), k_KSD.dtype

    def heads_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, W]`` rows as keys ``[K, n, D]`` and values ``[K, n, Dv]``: views."""
        return self.head_shape.split(rows)

    @property
    def row_width(self) -> int:
        """Elements of a token's keys and values."""
        return self.head_shape.width

    @cached_property
    def quantiser(self) -> GroupQuantiser | None:
        """What rows are packed with off the accelerator; None where they keep their type."""
        return self._quantiser(self.head_shape.heads)

    @cached_property
    def body_quantiser(self) -> GroupQuantiser | None:
        """The same of what compression keeps: a token's key and its value of one head, in the groups that they have in
        a row.
        """
        return self._quantiser(1)

    def _quantiser(self, heads: int) -> GroupQuantiser | None:
        if self._config.kv_bits is None or not heads:
            return None
        _, key_dim, value_dim = self.head_shape
        group = group_size(key_dim, value_dim, self._config.kv_group)
        return GroupQuantiser(heads * (key_dim + value_dim), group, self.dtype, self._config.kv_bits)

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

    @property
    def body_row_bytes(self) -> int:
        """Bytes of what compression keeps of a token in one head, off the accelerator."""
        quantiser, shape = self.body_quantiser, self.head_shape
        return (shape.key_dim + shape.value_dim) * self.dtype.itemsize if quantiser is None else quantiser.nbytes
