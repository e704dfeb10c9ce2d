"""Block types of GGUF: several weights of a row share a scale and an offset, and each has a level of 4 to 8 bits.

A weight is a scale times its level, plus an offset, in float32 and rounded once. Blocks of 256 (K-quants) have scales
of 16 or 32 weights in 6 or 8 bits, themselves multiples of the block's float16 ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockType:
    """Weights in a block, its bytes, and GGML's number of the type, by which compiled calls know it too."""

    name: str
    elements: int
    bytes: int
    number: int

    def row_bytes(self, columns: int) -> int:
        """Those of a row of so many weights; a ValueError says that blocks do not divide it."""
        if columns % self.elements:
            raise ValueError(
                f"rows of {columns} weights are no whole blocks of {self.name}, {self.elements} weights each"
            )
        return columns // self.elements * self.bytes


BLOCKS = {
    block.name: block
    for block in (
        BlockType("Q4_0", 32, 18, 2),
        BlockType("Q4_1", 32, 20, 3),
        BlockType("Q5_0", 32, 22, 6),
        BlockType("Q5_1", 32, 24, 7),
        BlockType("Q8_0", 32, 34, 8),
        BlockType("Q4_K", 256, 144, 12),
        BlockType("Q5_K", 256, 176, 13),
        BlockType("Q6_K", 256, 210, 14),
    )
}

NUMBERED = {block.number: block for block in BLOCKS.values()}
"""The same by their numbers."""


def unpack(packed: Tensor, kind: str) -> Tensor:
    """``[rows, columns]`` float32 of ``[rows, row bytes]`` uint8: the bits that `gguf.quants.dequantize` gives."""
    block = BLOCKS[kind]
    rows, size = packed.shape
    if packed.dtype != torch.uint8 or size % block.bytes:
        raise ValueError(
            f"rows of {size} bytes in {packed.dtype} are no whole blocks of {kind}, {block.bytes} bytes each"
        )
    columns = size // block.bytes * block.elements
    return _UNPACKED[kind](packed.reshape(rows * size // block.bytes, block.bytes)).reshape(rows, columns)


def pack(weight: Tensor, kind: str) -> Tensor:
    """``[rows, row bytes]`` uint8 of ``[rows, columns]``, as GGUF's own quantiser packs them: Q8_0 or Q4_1."""
    size = BLOCKS[kind].row_bytes(weight.shape[1])
    return _PACKED[kind](weight.float().reshape(-1, BLOCKS[kind].elements)).reshape(len(weight), size)


def _halves(blocks: Tensor, first: int) -> Tensor:
    """``[n, 1]`` float32 of the float16 that begins with a byte."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _shifted(x: Tensor, *shifts: int) -> Tensor:
    """``[n, runs, m]`` bytes, each run once for each shift: ``[n, runs, shifts, m]``."""
    return x[:, :, None] >> torch.tensor(shifts, dtype=torch.uint8, device=x.device)[:, None]


def _nibbles(x: Tensor, run: int) -> Tensor:
    """Levels of ``[n, m]`` bytes, the low halves of each run before its high ones: ``[n, 2 m]``."""
    return _shifted(x.unflatten(1, (-1, run)), 0, 4).bitwise_and_(15).flatten(1)


def _fifth_bits(blocks: Tensor, first: int) -> Tensor:
    """``[n, 32]`` of four bytes: 16 where a bit is set."""
    bits = _shifted(blocks[:, first : first + 4, None], *range(8)).flatten(1)
    return bits.bitwise_and_(1) << 4


def _signed(levels: Tensor, zero: int) -> Tensor:
    return levels.float() - zero


def _q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _signed(_nibbles(blocks[:, 2:], 16), 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:], 16).float() + _halves(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _signed(_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2), 16)


def _q5_1(blocks: Tensor) -> Tensor:
    levels = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4)
    return _halves(blocks, 0) * levels.float() + _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _offset_by_32(blocks: Tensor, levels: Tensor) -> Tensor:
    """Weights of K-quants in ``[n, 256]`` levels: 12 bytes are eight scales and offsets of 6 bits."""
    scale, offset, both = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((scale & 63, both & 15 | scale >> 2 & 48), dim=1)
    offsets = torch.cat((offset & 63, both >> 4 | offset >> 2 & 48), dim=1)
    scales, offsets = _halves(blocks, 0) * scales.float(), _halves(blocks, 2) * offsets.float()
    return scales[..., None] * levels.unflatten(1, (8, 32)).float() - offsets[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    return _offset_by_32(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    high = _shifted(blocks[:, None, 16:48], *range(8)).flatten(1)
    return _offset_by_32(blocks, _nibbles(blocks[:, 48:], 32) | (high & 1) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    high = _shifted(blocks[:, 128:192].unflatten(1, (2, 32)), 0, 2, 4, 6).flatten(1)
    levels = _signed(_nibbles(blocks[:, :128], 64) | (high & 3) << 4, 32)
    scales = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return scales[..., None] * levels.unflatten(1, (16, 16))


_UNPACKED: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


def _bytes_of(scale: Tensor) -> Tensor:
    return scale.to(torch.float16).view(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _to_q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(1, keepdim=True) / 127
    steps = blocks * _inverse(scale)
    # Halves go away from zero.
    size, whole = steps.abs(), steps.abs().floor()
    levels = steps.sign() * (whole + (2 * (size - whole)).floor())
    return torch.cat((_bytes_of(scale), levels.to(torch.int8).view(torch.uint8)), dim=1)


def _to_q4_1(blocks: Tensor) -> Tensor:
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    scale = (high - low) / 15
    levels = ((blocks - low) * _inverse(scale) + 0.5).to(torch.uint8).clamp_(0, 15)
    first, second = levels.chunk(2, dim=1)
    return torch.cat((_bytes_of(scale), _bytes_of(low), first | second << 4), dim=1)


_PACKED: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _to_q8_0, "Q4_1": _to_q4_1}
