"""Rows times a weight in GGUF's blocks, which is unpacked a few rows at a time, and only while it is multiplied.

Products are those of the unpacked float32 weights: activations are never rounded to fewer bits than they have.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megakv.weights.blocks import BLOCKS, unpack
from megakv.weights.products import BLOCK, PLAIN, Products


def packed_product(
    x: Tensor, packed: Tensor, kind: str, columns: int, bias: Tensor | None = None, products: Products = PLAIN
) -> Tensor:
    """``[..., columns]`` times the transpose of a weight ``[out, row bytes]`` uint8: ``[..., out]`` in the type of x.

    The weight may be a view of consecutive rows, or of consecutive blocks of all rows.
    """
    size = BLOCKS[kind].row_bytes(columns)
    if x.shape[-1] != columns or packed.shape[1] != size:
        raise ValueError(f"inputs of {x.shape[-1]} columns do not fit rows of {packed.shape[1]} bytes of {kind}")
    rows, out = x.flatten(0, -2).float(), x.new_empty((*x.shape[:-1], len(packed)))
    outputs, each = out.flatten(0, -2), max(BLOCK // columns, 1)
    for first in range(0, len(packed), each):
        some = slice(first, first + each)
        outputs[:, some] = F.linear(rows, unpack(packed[some], kind), None if bias is None else bias[some].float())
    return out
