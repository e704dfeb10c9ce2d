"""Which library multiplies on processors: PyTorch's, oneDNN, MegaKV's own, or float32 for 16-bit weights.

On passes of few rows, as in decoding, a product reads every weight once for a handful of rows: what it takes is the
time of reading them. On passes of many, libraries differ: some leave half of a processor unused, and some processors
multiply 16-bit numbers at half the rate of float32. So all that there are multiply a made-up weight at start. None
needs weights in another layout than the model has them in: what is packed is so within a call, for all of its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakv.attention.linear import FEW_ROWS as KERNEL_ROWS
from megakv.attention.linear import load_linear, seconds_by_turns
from megakv.attention.prefill import load_prefill
from megakv.base.library import TYPES
from megakv.tracking.measurements import ProductRates

FEW_ROWS = 64
"""Rows up to which a product by itself goes through the kernel for few rows."""
ROW_STEP = 8
"""Of 16-bit rows, PyTorch's product is given a multiple of so many: oneDNN keeps code, some 250 KB, for every number of
rows that it has seen, and a server sees all."""
OWN, TORCH, ONEDNN, WIDENED = "MegaKV", "PyTorch", "oneDNN", "float32"
MEASURED, SIZE, TRIALS = (48, 192, 512), 512, 8
"""Rows, the outputs and inputs of a weight, and rounds of a measurement."""
LEAST_GAIN = 1.1
"""How many times as fast as PyTorch's a product must be that is taken in its place."""
KERNEL_GAINS = {256: 0.8, 64: 1.1}
"""Rows up to which the kernel for few rows is taken where, with three quarters of them, it is so many times as fast as
any other. Layers of few rows are one call, which spares more than a slower product costs."""
LEAST_SHARE = 0.9
"""The same for many rows: what lies between a layer's products is then done while it lies in caches. Its sums are also
more exact than oneDNN's."""
WHOLE_ROWS = 1024
"""Rows up to which all layers are one call where it fuses: of more, what the last layer leaves out spares as much."""
SLICED_ROWS = 128
"""Rows up to which ranks that share memory compute all rows with slices of weights, not some with all of them: of more,
sums over ranks take longer than reading weights (measured)."""
MOST_ROWS = 2048
"""Rows of 16-bit numbers that are widened at a time."""
BLOCK = 1 << 21
"""Elements of a weight that are widened at a time: they stay in the last cache."""


@dataclass(frozen=True)
class Products:
    """How products are computed on processors, alike on all ranks: rounding must not differ where ranks do the same.

    The compiled kernel takes up to `most_rows`, and multiplies bfloat16 by `pairs`, or widened; `many` names the
    library of more rows, and `fuses` says whether layers of many rows are compiled calls all the same.
    """

    most_rows: int = KERNEL_ROWS
    pairs: bool = False
    many: str = TORCH
    fuses: bool = False
    rates: tuple[ProductRates, ...] = ()
    """What was measured, for the report."""

    @classmethod
    def measured(cls, dtype: torch.dtype) -> Products:
        """What is fastest here, by products that take milliseconds."""
        if dtype not in TYPES:
            return cls()
        rates = [_rates(dtype, rows) for rows in MEASURED]
        (most, _), (some, _) = KERNEL_GAINS.items()
        gains = [found.get(OWN, 0.0) / max(rate for name, rate in found.items() if name != OWN) for found in rates]
        most_rows = most if gains[1] >= KERNEL_GAINS[most] else some if gains[0] >= KERNEL_GAINS[some] else KERNEL_ROWS
        fuses = gains[-1] >= LEAST_SHARE
        best = OWN if fuses else max(rates[-1], key=lambda name: rates[-1][name])
        many = best if rates[-1][best] >= LEAST_GAIN * rates[-1][TORCH] else TORCH
        # Layers are the most of what is multiplied.
        rest = OWN if fuses else many
        names = [OWN if rows <= most_rows else rest for rows in (some, most)]
        bounds = zip((KERNEL_ROWS + 1, some + 1, most + 1), (some, most, None), (*names, rest), rates, strict=True)
        table = tuple(ProductRates(first, last, name, found) for first, last, name, found in bounds)
        return cls(most_rows, multiplies_pairs(dtype), many, fuses, table)

    @property
    def whole_rows(self) -> int:
        """Rows up to which all layers of a rank that meets no others are one call."""
        return max(self.most_rows, WHOLE_ROWS) if self.fuses else self.most_rows

    @property
    def widens(self) -> bool:
        """Whether many rows are multiplied in float32."""
        return self.many == WIDENED


PLAIN = Products()
"""Where nothing was measured."""


def rows_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, products: Products = PLAIN) -> Tensor:
    """``[..., in]`` times ``[out, in]``: ``[..., out]`` in the type of x, which is the weight's too.

    The weight may be a view: of consecutive rows, or of consecutive columns, whose rows then lie further apart.
    """
    kernel, _ = load_linear()
    most_rows = min(products.most_rows, FEW_ROWS)
    if kernel is not None and kernel.computes(x, weight, bias, most_rows):
        return kernel(x, weight, bias, pairs=products.pairs)
    return many_product(x, weight, bias, products)


def many_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, products: Products = PLAIN) -> Tensor:
    """The same for more rows than those of the kernel for few."""
    if (rows := x.numel() // x.shape[-1]) > MOST_ROWS and products.many in (OWN, WIDENED) and x.element_size() == 2:
        # Inputs are widened, too.
        out = x.new_empty((rows, len(weight)))
        for some, into in zip(x.flatten(0, -2).split(MOST_ROWS), out.split(MOST_ROWS), strict=True):
            into.copy_(many_product(some, weight, bias, products))
        return out.unflatten(0, x.shape[:-1])
    if products.many == WIDENED and x.element_size() == 2 and not few_rows(x):
        return widened_product(x, weight, bias)
    if products.many == OWN:
        kernel, _ = load_linear()
        if kernel is not None and kernel.computes(x, weight, bias, None):
            return kernel(x, weight, bias, pairs=products.pairs)
    onednn = products.many == ONEDNN and _takes(x, weight, bias)
    return padded_product(x, weight, bias, _onednn if onednn else F.linear)


def padded_product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, product: Callable[..., Tensor] = F.linear
) -> Tensor:
    """PyTorch's product, or oneDNN's, on processors of one of few numbers of rows, where oneDNN keeps code for each."""
    rows = x.numel() // x.shape[-1]
    missing = -rows % (ROW_STEP if rows <= FEW_ROWS else 2 * ROW_STEP)
    keeps = x.element_size() == 2 or product is not F.linear
    if not missing or x.device.type != "cpu" or not keeps or torch.is_grad_enabled():
        return product(x, weight, bias)
    return product(F.pad(x.flatten(0, -2), (0, 0, 0, missing)), weight, bias)[:rows].unflatten(0, x.shape[:-1])


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


def few_rows(x: Tensor) -> bool:
    """Whether an input has so few rows that the kernel for few may take it."""
    return x.numel() <= FEW_ROWS * x.shape[-1] and not autocast(x)


def autocast(x: Tensor) -> bool:
    """Whether products of an input are in a type that its own does not tell."""
    return torch.is_autocast_enabled(x.device.type)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product by oneDNN, which PyTorch's own does not call in float32; the weight lies as it is."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN multiplies these: plain ones in float32, in memory that it can be told of.

    With weights whose rows lie apart, as those of a slice's columns, it takes a thousand times as long (measured).
    """
    given = [each for each in (x, weight, bias) if each is not None]
    plain = all(type(each) in (Tensor, nn.Parameter) and each.dtype == torch.float32 for each in given)
    here = all(each.device.type == "cpu" and each.layout == torch.strided for each in given)
    return (
        plain
        and here
        and weight.is_contiguous()
        and x.numel() > 0
        and weight.numel() > 0
        and not torch.is_grad_enabled()
    )


def libraries(dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """Products that there are here for a type, by the name of their library."""
    found: dict[str, Callable[..., Tensor]] = {TORCH: padded_product}
    if dtype not in TYPES:
        return found
    if (kernel := load_linear()[0]) is not None:
        found[OWN] = functools.partial(kernel, pairs=multiplies_pairs(dtype))
    if dtype != torch.float32:
        # PyTorch's product of 16-bit numbers is oneDNN's already.
        found[WIDENED] = widened_product
    elif torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled:
        try:
            with torch.no_grad():
                _onednn(*(torch.ones((2, 3), device="cpu") for _ in range(2)))
            found[ONEDNN] = functools.partial(padded_product, product=_onednn)
        except (RuntimeError, AttributeError, NotImplementedError):
            # The operator is none that PyTorch documents.
            pass
    return found


def multiplies_pairs(dtype: torch.dtype) -> bool:
    """Whether numbers of a type are multiplied by pairs, which the processor is faster with."""
    attention, _ = load_prefill()
    return attention is not None and attention.rounds(dtype)


def _rates(dtype: torch.dtype, rows: int) -> dict[str, float]:
    """Operations a second of each library, with so many rows."""
    x, weight = (torch.ones((count, SIZE), dtype=dtype, device="cpu") for count in (rows, SIZE))
    found = libraries(dtype)
    seconds = seconds_by_turns(found.values(), x, weight, trials=TRIALS)
    return {name: 2 * rows * SIZE * SIZE / each for name, each in zip(found, seconds, strict=True)}
