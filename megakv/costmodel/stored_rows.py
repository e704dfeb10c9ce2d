"""Bytes of rows of keys and values off the accelerator: in few bits, and in pages."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from megakv.base.errors import MegaKVError, in_units
from megakv.costmodel.shape import ModelShape


@dataclass(frozen=True)
class OffloadSizes:
    """Settings of offloading that decide how many bytes it takes."""

    page_bytes: int = 512 << 10
    device_bytes: int = 0
    """Memory of the accelerator for rows that stay there."""
    groups: int = 1
    """Groups in which the sequences of a batch go through each layer."""
    kv_bits: int | None = None
    """Bits of a key or value; None: the model's own type."""
    kv_group: int = 64
    """Elements of a head that share a step and a smallest value, at most."""
    recomputes: bool = True
    """Whether activations may be kept to recompute keys and values from."""


def may_pay(input_bytes: float, kv_bytes: float) -> bool:
    """Whether recomputing may pay on any machine: activations must be fewer bytes than keys and values."""
    return input_bytes < kv_bytes


def group_size(key_dim: int, value_dim: int, asked: int) -> int:
    """The largest size up to `asked` that cuts keys and values of these dimensions into equal groups."""
    whole = gcd(key_dim, value_dim)
    return max(size for size in range(1, min(asked, whole) + 1) if whole % size == 0)


def packed_bytes(width: int, group: int, dtype: torch.dtype, bits: int) -> int:
    """Bytes of a row of so many elements of a type once it is packed, in groups of some size."""
    return -(-width * bits // 8) + 2 * (width // group) * (2 if dtype == torch.float16 else 4)


def stored_bytes(model: ModelShape, row: int, offload: OffloadSizes) -> int:
    """Bytes off the accelerator of a token's keys and values in a layer, which are `row` bytes on it."""
    if offload.kv_bits is None:
        return row
    dims = (model.key_dim, model.value_dim) if model.row_dim is None else (model.row_dim, 0)
    group = group_size(*dims, offload.kv_group)
    return packed_bytes(row // model.element_bytes, group, model.dtype, offload.kv_bits)


def page_bytes(count: int, row_bytes: int, size: int) -> int:
    """Bytes of the pages of a size that so many rows take; a MegaKVError if a row does not fit a page."""
    if not row_bytes:
        return 0
    if row_bytes > size:
        raise MegaKVError(
            f"megakv.offload.page_kib = {size >> 10} is too small: a token's row in one layer has {in_units(row_bytes)}"
        )
    return size * -(-count // (size // row_bytes))
