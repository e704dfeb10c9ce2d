"""Which library multiplies on processors, and how: PyTorch, the compiled kernel, or float32 for 16-bit weights.

On passes of few rows, as in decoding, a product reads every weight once for a handful of rows: what it takes is the
time of reading them. On passes of many, some processors multiply 16-bit numbers at half the rate of float32: there
weights are widened, a block at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megakv.attention.linear import FEW_ROWS as KERNEL_ROWS
from megakv.attention.linear import load_linear, times_as_fast
from megakv.attention.prefill import load_prefill

FEW_ROWS = 64
"""Rows up to which a product by itself goes through `rows_product`."""
ROW_STEP = 8
"""Of 16-bit rows, PyTorch's product is given a multiple of so many: oneDNN keeps code, some 250 KB, for every number of
rows that it has seen, and a server sees all."""
LEAST_GAIN = 1.1
"""How many times as fast widened products must be on a small example."""
BLOCK = 1 << 21
"""Elements of a weight that are widened at a time: they stay in the last cache."""


@dataclass(frozen=True)
class Products:
    """How products are computed on processors, alike on all ranks: rounding must not differ where ranks do the same.

    The compiled kernel takes up to `most_rows`, and multiplies bfloat16 by `pairs`, or widened; `widens` says whether
    more are multiplied in float32.
    """

    most_rows: int = KERNEL_ROWS
    pairs: bool = False
    widens: bool = False

    @classmethod
    def measured(cls, dtype: torch.dtype) -> Products:
        """What is fastest here, by products that take milliseconds."""
        (kernel, _), (attention, _) = load_linear(), load_prefill()
        pairs = attention is not None and attention.rounds(dtype)
        most_rows = KERNEL_ROWS if kernel is None else kernel.most_rows(dtype, pairs=pairs)
        return cls(most_rows, pairs, widening_pays(dtype))


PLAIN = Products()
"""Where nothing was measured."""


def rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    products: Products = PLAIN,
) -> Tensor:
    """``[..., in]`` of few rows times ``[out, in]``: ``[..., out]`` in the type of x, which is the weight's too.

    The weight may be a view: of consecutive rows, or of consecutive columns, whose rows then lie further apart.
    """
    kernel, _ = load_linear()
    if kernel is not None and kernel.computes(x, weight, bias, products.most_rows):
        return kernel(x, weight, bias, pairs=products.pairs)
    return padded_product(x, weight, bias)


def padded_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """PyTorch's product, on processors of one of few numbers of 16-bit rows."""
    rows = x.numel() // x.shape[-1]
    missing = -rows % (ROW_STEP if rows <= FEW_ROWS else 2 * ROW_STEP)
    if not missing or x.device.type != "cpu" or x.element_size() != 2 or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x.flatten(0, -2), (0, 0, 0, missing)), weight, bias)[:rows].unflatten(0, x.shape[:-1])


def widened_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with weights and inputs in float32, rounded once, at the end."""
    outputs, columns = weight.shape
    wide, out = x.flatten(0, -2).float(), x.new_empty((*x.shape[:-1], outputs))
    rows, each = out.flatten(0, -2), max(BLOCK // columns, 1)
    scratch = torch.empty((min(each, outputs), columns), dtype=torch.float32)
    for first in range(0, outputs, each):
        some = slice(first, first + each)
        block = scratch[: len(weight[some])].copy_(weight[some])
        if bias is None:
            rows[:, some] = torch.mm(wide, block.t())
        else:
            rows[:, some] = torch.addmm(bias[some].float(), wide, block.t())
    return out


def widening_pays(dtype: torch.dtype) -> bool:
    """Whether that is faster here than PyTorch's product."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    rows = 128 * torch.get_num_threads()
    x, weight = (torch.ones(shape, dtype=dtype, device="cpu") for shape in ((rows, 512), (768, 512)))
    return times_as_fast(F.linear, widened_product, x, weight) >= LEAST_GAIN


def few_rows(x: Tensor) -> bool:
    """Whether an input has so few rows that its product goes through `rows_product`."""
    return x.numel() <= FEW_ROWS * x.shape[-1] and not autocast(x)


def autocast(x: Tensor) -> bool:
    """Whether products of an input are in a type that its own does not tell."""
    return torch.is_autocast_enabled(x.device.type)
