"""Rows times a weight in GGUF's blocks: few rows by a kernel that reads blocks, more by weights unpacked in caches.

Products are those of the unpacked float32 weights. Where the processor multiplies bytes, few rows become integers of 24
bits, alike scaled for 32 of them. Where it multiplies many rows of bfloat16 by pairs, weights are rounded to bfloat16,
as those of a model that was unpacked in that type.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megakv.attention.layer import Weight
from megakv.attention.linear import FEW_ROWS as KERNEL_ROWS
from megakv.attention.linear import LinearKernel, load_linear
from megakv.weights.blocks import BLOCKS, NUMBERED, BlockType, unpack
from megakv.weights.products import BLOCK, OWN, PLAIN, Products, many_product, rows_product

TOLERANCE = 1e-5


def packed_product(
    x: Tensor, packed: Tensor, kind: str, columns: int, bias: Tensor | None = None, products: Products = PLAIN
) -> Tensor:
    """``[..., columns]`` times the transpose of a weight ``[out, row bytes]`` uint8: ``[..., out]`` in the type of x.

    The weight may be a view of consecutive rows, or of consecutive blocks of all rows.
    """
    block = BLOCKS[kind]
    if x.shape[-1] != columns or packed.shape[1] != block.row_bytes(columns):
        raise ValueError(f"inputs of {x.shape[-1]} columns do not fit rows of {packed.shape[1]} bytes of {kind}")
    kernel, _ = load_packed()
    most_rows = None if products.many == OWN else max(products.most_rows, KERNEL_ROWS)
    if kernel is not None and kernel.reads(x, packed, bias, most_rows):
        return kernel(x, packed, bias, pairs=products.pairs, blocks=block.number)
    return unpacked_product(x, packed, block, columns, bias, products)


def weight_product(x: Tensor, part: Weight, products: Products = PLAIN, *, many: bool = False) -> Tensor:
    """The same of a weight in blocks or a plain one; of that `many` rows as no kernel for few multiplies them."""
    if part.blocks:
        return packed_product(x, part.weight, NUMBERED[part.blocks].name, part.columns, part.bias, products)
    return (many_product if many else rows_product)(x, part.weight, part.bias, products)


def unpacked_product(
    x: Tensor, packed: Tensor, block: BlockType, columns: int, bias: Tensor | None, products: Products = PLAIN
) -> Tensor:
    """The same by a library for many rows, with a few rows of the weight unpacked at a time."""
    kernel = load_packed()[0] if packed.device.type == "cpu" else None
    rounds = x.dtype == torch.bfloat16 and products.pairs and not products.widens
    dtype = torch.bfloat16 if rounds else torch.float32
    rows, out = x.flatten(0, -2).to(dtype), x.new_empty((*x.shape[:-1], len(packed)))
    outputs, each = out.flatten(0, -2), max(BLOCK // columns, 1)
    scratch = rows.new_empty((min(each, len(packed)) if kernel else 0, columns))
    for first in range(0, len(packed), each):
        own, offset = packed[first : first + each], None if bias is None else bias[first : first + each].to(dtype)
        if kernel is None or own.stride(1) != 1:
            weight = unpack(own, block.name).to(dtype)
        else:
            weight = kernel.unpack(own, columns, block.number, scratch[: len(own)])
        outputs[:, first : first + each] = many_product(rows, weight, offset, products)
    return out


@functools.cache
def load_packed() -> tuple[LinearKernel | None, str]:
    """The kernel of products, or None and why there is none, or why it is none for weights in blocks."""
    kernel, reason = load_linear()
    if kernel is not None and (reason := _problem(kernel)):
        return None, reason
    return kernel, reason


def _problem(kernel: LinearKernel) -> str:
    """What is wrong with its results on small examples; empty if nothing is."""
    # Whatever device is the default one.
    generator = torch.Generator("cpu").manual_seed(0)
    for block in BLOCKS.values():
        count = 512 // block.elements
        packed = torch.randint(256, (21 * count, block.bytes), dtype=torch.uint8, generator=generator, device="cpu")
        # Scales are the first numbers of a block, and an offset the next one; of one type the scale is the last.
        one = torch.tensor([1.0 / block.elements], dtype=torch.float16, device="cpu").view(torch.uint8)
        packed[:, :4], packed[:, -2:] = one.repeat(2), one
        packed, columns = packed.view(21, -1), count * block.elements
        weight = unpack(packed, block.name).double()
        for rows in (3, 20):
            x = torch.randn((rows, columns), generator=generator, device="cpu")
            with torch.no_grad():
                found = kernel(x, packed, blocks=block.number).double()
            size = x.double().abs() @ weight.abs().t()
            if not bool(((found - x.double() @ weight.t()).abs() <= TOLERANCE * size).all()):
                return f"compiled, its products with {block.name} differ from the reference by more than {TOLERANCE}"
    return ""
