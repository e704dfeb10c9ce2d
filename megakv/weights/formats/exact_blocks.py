"""Weights that are levels times scales, put into GGUF's blocks without a change, so that these stay packed too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megakv.weights.blocks import BLOCKS
from megakv.weights.lazy import LazyTensor
from megakv.weights.placement.slices import Ranges, SliceSpec

KINDS = {4: "Q4_0", 8: "Q8_0"}
"""Blocks of levels of some bits around zero, with a scale in float16."""
SIZE = 32
"""Weights in one of them."""
Read = Callable[[int, Ranges], Tensor]


class BlockTensor(LazyTensor):
    """A weight ``[out, in]`` that can also be read as packed rows of a `kind`."""

    def __init__(self, unpacked: LazyTensor, kind: str, blocks: Read):
        super().__init__(unpacked.shape, unpacked.read)
        self.kind = kind
        self.blocks = blocks
        """As `read`, but ``[out, row bytes]`` uint8; ranges of inputs are whole blocks."""


def in_blocks(unpacked: LazyTensor, levels: Read, scales: Callable[[], Tensor], bits: int) -> LazyTensor:
    """A weight whose `levels` are numbers of some bits around zero, with scales ``[out, groups]``.

    It comes as it is where blocks cannot hold its scales: of other groups than whole blocks, or no numbers of float16.
    """
    columns, found = unpacked.shape[1], scales()
    groups = found.shape[1]
    if bits not in KINDS or columns % (groups * SIZE) or not torch.equal(found.half().float(), found.float()):
        return unpacked
    kind = KINDS[bits]

    def blocks(dim: int, ranges: Ranges) -> Tensor:
        halves = scales().half().repeat_interleave(columns // groups // SIZE, 1)
        cut = ranges if dim == 0 else tuple((start // SIZE, stop // SIZE) for start, stop in ranges)
        return packed_rows(levels(dim, ranges), SliceSpec(dim, cut).take(halves), kind)

    return BlockTensor(unpacked, kind, blocks)


def packed_rows(levels: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Levels ``[rows, columns]`` and float16 scales ``[rows, columns / 32]`` in blocks: ``[rows, row bytes]``."""
    numbers = levels.unflatten(1, (-1, SIZE)).to(torch.int8)
    if kind == "Q4_0":
        nibbles = (numbers + 8).view(torch.uint8)
        numbers = (nibbles[..., :16] | (nibbles[..., 16:] << 4)).view(torch.int8)
    out = torch.empty(*scales.shape, BLOCKS[kind].bytes, dtype=torch.uint8)
    out[..., :2] = scales.contiguous().view(torch.uint8).unflatten(1, (-1, 2))
    out[..., 2:] = numbers.view(torch.uint8)
    return out.flatten(1)
