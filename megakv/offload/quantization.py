"""Keys and values in four bits off the accelerator (KVPR, Section 4.4; FlexGen): lossy, and off unless asked for.

Each head's key, and each head's value, is cut along the head dimension into groups, as in FlexGen. A group keeps its
smallest value and a step, of which there are fifteen up to its largest; every element becomes the nearest of sixteen.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from megakv.errors import MegaKVError

LEVELS = 15


def group_size(key_dim: int, value_dim: int, asked: int) -> int:
    """The largest size up to `asked` that cuts keys and values of these dimensions into equal groups."""
    whole = gcd(key_dim, value_dim)
    return max(size for size in range(1, min(asked, whole) + 1) if whole % size == 0)


def packed_bytes(width: int, group: int, dtype: torch.dtype) -> int:
    """Bytes of a row of so many elements of a type once it is packed, in groups of some size."""
    if width % 2:
        raise MegaKVError(f"megakv.offload.kv_bits = 4 needs an even number of elements in a token's row, not {width}")
    return width // 2 + 2 * (width // group) * _scale_dtype(dtype).itemsize


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of steps and smallest values."""
    return torch.float16 if dtype == torch.float16 else torch.float32


class GroupQuantiser:
    """Rows of an even width and a type, in four bits with a step and a smallest value for each group of elements.

    Steps and smallest values are float16 for rows in float16, and float32 otherwise. A value differs from what comes
    back for it by at most half a step, and by what rounding those two to their type costs.
    """

    def __init__(self, width: int, group: int, dtype: torch.dtype):
        self.nbytes = packed_bytes(width, group, dtype)
        self._width = width
        self._group = group
        self._dtype = dtype
        self._scale_dtype = _scale_dtype(dtype)

    def pack(self, rows: Tensor) -> Tensor:
        """``[n, W]`` rows as ``[n, nbytes]`` bytes: two elements in each, then steps, then smallest values."""
        groups = rows.float().unflatten(1, (-1, self._group))
        low, high = groups.aminmax(dim=2)
        low = low.to(self._scale_dtype)
        step = ((high - low.float()) / LEVELS).to(self._scale_dtype)
        inverse = torch.where(step > 0, step.float().reciprocal(), 0.0)
        levels = (groups - low.float().unsqueeze(2)).mul_(inverse.unsqueeze(2)).round_().clamp_(0, LEVELS)
        levels = levels.to(torch.uint8).flatten(1)
        pairs = levels[:, 0::2] | levels[:, 1::2] << 4
        return torch.cat((pairs, torch.cat((step, low), dim=1).view(torch.uint8)), dim=1)

    def unpack(self, packed: Tensor, rows: Tensor) -> None:
        """Write the rows that ``[n, nbytes]`` bytes stand for into ``[n, W]``."""
        half = self._width // 2
        pairs, scales = packed[:, :half], packed[:, half:].contiguous().view(self._scale_dtype)
        step, low = scales.float().chunk(2, dim=1)
        levels = torch.stack((pairs & LEVELS, pairs >> 4), dim=2).flatten(1).unflatten(1, (-1, self._group))
        rows.copy_(torch.addcmul(low.unsqueeze(2), levels.float(), step.unsqueeze(2)).flatten(1))
