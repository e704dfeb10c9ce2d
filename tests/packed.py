"""Weights in GGUF's blocks, drawn at random: all levels and scales of a block, none of them infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from megakv.weights.blocks import BLOCKS

HALVES = dict.fromkeys(BLOCKS, (0,)) | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)) | {"Q6_K": (208,)}
"""Where the float16 numbers of a block begin."""


def drawn_packed(rows: int, columns: int, kind: str) -> Tensor:
    """``[rows, row bytes]``, whose weights are mostly smaller than one."""
    block = BLOCKS[kind]
    packed = torch.randint(256, (rows * columns // block.elements, block.bytes), dtype=torch.uint8)
    for first in HALVES[kind]:
        scale = torch.randn(len(packed), 1) * 2.0 ** (-10 if block.elements == 256 else -5)
        packed[:, first : first + 2] = scale.half().view(torch.uint8)
    return packed.reshape(rows, block.row_bytes(columns))
