"""How much a block of threads has in hand of what it attends to on CUDA, by the memory that it has for it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

LEAST_ROWS = 16  # A product of Triton has as many query rows at least.
KEYS = ((64, 3), (64, 2), (32, 2))  # Keys of a tile, and tiles under way: the first of them that has room.
SHARED_SHARE = 0.9  # Of the memory that a block of threads shares: products need some of it themselves.
LEAST_SHARED_BYTES = 48 << 10  # Every GPU has them.


class Tiles(NamedTuple):
    """Sizes of what a kernel has in hand: powers of two, but for how many tiles of keys are under way."""

    rows: int
    width: int
    value_width: int
    keys: int
    stages: int

    @classmethod
    def of(cls, group: int, dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> Tiles | None:
        """Those of so many query rows of a KV head; None where there is no room for them."""
        rows, width, value_width = (max(LEAST_ROWS, 1 << (size - 1).bit_length()) for size in (group, dim, value_dim))
        room = SHARED_SHARE * _shared_bytes(device)
        for keys, stages in KEYS:
            held = rows * (width + keys) + (stages - 1) * keys * (width + value_width)
            if held * dtype.itemsize <= room:
                return cls(rows, width, value_width, keys, stages)
        return None


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", LEAST_SHARED_BYTES))
