"""Linears of a model's decoder layers and its output head on processors, which multiply as `Products` says; parts of
them, for ranks that divide them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.attention.layer import Weight
from megakv.distributed.comm import Communicator, Over
from megakv.weights.blocks import BLOCKS
from megakv.weights.packed_linear import PackedLinear
from megakv.weights.packed_product import weight_product
from megakv.weights.placement.plan import decoder_layers
from megakv.weights.placement.slices import Ranges, SliceSpec, split_width
from megakv.weights.products import PLAIN, TORCH, Products, autocast, few_rows, rows_product
from megakv.weights.quantised import is_plain_linear
from megakv.weights.tensor_parallel import AllReduce, RowParallelLinear

LEAST_WEIGHT = 1 << 16
"""Elements of a weight below which reading it takes less than finding out how (measured)."""


class FewRowsForward:
    """In the place of the `forward` of one linear, whose class stays; what other inputs take is as before."""

    def __init__(self, linear: nn.Linear, products: Products):
        self.linear, self.products = linear, products
        self.before = linear.forward
        self.sliced: Callable[[Tensor], Tensor | None] | None = None
        """What it computes instead in a pass in which ranks have slices of it; None of itself in others."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        if self.sliced is not None and (out := self.sliced(x)) is not None:
            return out
        linear: Any = self.linear
        if isinstance(linear, PackedLinear):
            return self.before(x)
        if not few_rows(x):
            own = self.products.many == TORCH and x.element_size() != 2
            if own or x.device.type != "cpu" or x.dtype != linear.weight.dtype or autocast(x):
                return self.before(x)
        if not isinstance(linear, RowParallelLinear):
            return rows_product(x, linear.weight, linear.bias, self.products)
        # Spread over tensor-parallel ranks: the sum over them.
        out = linear.all_reduce(rows_product(x, linear.weight, None, self.products))
        return out if linear.bias is None else out + linear.bias


class FewRowsLinears:
    """Another `forward` for the linears of a model's decoder layers, and its output head, until `remove`."""

    def __init__(self, model: PreTrainedModel, products: Products = PLAIN):
        self.forwards: list[FewRowsForward] = []
        head = model.get_output_embeddings()
        for module in (*(inner for layer in layers_of(model) for inner in layer.modules()), head):
            # What is anything else may compute something else.
            packed = isinstance(module, PackedLinear) and "forward" not in vars(module)
            if packed or (is_plain_linear(module) and module.weight.numel() >= LEAST_WEIGHT):
                forward = FewRowsForward(module, products)
                module.forward = forward
                self.forwards.append(forward)
            if packed:
                module.products = products

    def remove(self) -> None:
        """Give the linears their own `forward` back."""
        for forward in self.forwards:
            del forward.linear.forward


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Its decoder layers, if it is known which they are."""
    try:
        return list(decoder_layers(model)[1])
    except ValueError:
        return []


def all_reduce_of(linear: nn.Linear) -> AllReduce | None:
    """The sum of a linear that is spread over tensor-parallel ranks; None of any other."""
    found: AllReduce | None = getattr(linear, "all_reduce", None)
    return found


def product(x: Tensor, part: Weight, products: Products = PLAIN) -> Tensor:
    """A product with a slice of a weight, ``[..., in]`` and ``[out, in]``."""
    own = part.blocks or (part.weight.stride(-1) == 1 and not autocast(x))
    return weight_product(x, part, products) if own else F.linear(x, part.weight, part.bias)


def cut_product(x: Tensor, weight: Tensor, bias: Tensor | None, ranges: Ranges) -> Tensor:
    """The outputs of some runs of a weight's rows, one behind the other."""
    parts = [product(x, Weight(weight[a:b], None if bias is None else bias[a:b])) for a, b in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class Slice:
    """Some rows, or columns, of a linear's weight: views, made anew only where it has been given another weight.

    Columns of a weight in blocks begin and end with a block.
    """

    __slots__ = ("_columns", "_linear", "_place", "_products", "_rows", "_view", "_weight")

    def __init__(
        self, linear: nn.Linear, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ):
        self._linear, self._rows, self._columns = linear, slice(*(rows or (None,))), columns
        self._weight: Tensor | None = None
        self._place: tuple[int, int | None] | None = None
        forward = vars(linear).get("forward")
        self._products = forward.products if isinstance(forward, FewRowsForward) else PLAIN

    def product(self, x: Tensor) -> Tensor:
        """``[..., in]`` times it; with the bias of its rows, where they are whole."""
        return product(x, self.part(), self._products)

    def part(self) -> Weight:
        """Its part of the weight, and the bias of its rows, where they are whole."""
        weight, bias = self._linear.weight, self._linear.bias
        # What is assigned to `data` leaves a parameter what it was.
        place = weight.data_ptr(), None if bias is None else bias.data_ptr()
        if weight is not self._weight or place != self._place:
            own = None if bias is None or self._columns else bias.detach()[self._rows]
            self._weight, self._place = weight, place
            self._view = weight_of(self._linear, weight.detach()[self._rows], own, self._columns)
        return self._view


def weight_of(linear: nn.Linear, rows: Tensor, bias: Tensor | None, columns: tuple[int, int] | None = None) -> Weight:
    """Some rows of a linear's weight, or some columns of those, for compiled calls."""
    if not isinstance(linear, PackedLinear):
        return Weight(rows[:, slice(*(columns or (None,)))], bias)
    block, (first, last) = BLOCKS[linear.kind], columns or (0, linear.in_features)
    return Weight(rows[:, block.row_bytes(first) : block.row_bytes(last)], bias, block.number, last - first)


def columns_of(linear: nn.Linear) -> tuple[int, int]:
    """Columns of a linear's weight, and how many stay together where it is cut along them: those of a block."""
    if isinstance(linear, PackedLinear):
        return linear.in_features, BLOCKS[linear.kind].elements
    return linear.weight.shape[1], 1


def cut_columns(linear: nn.Linear, rank: int, size: int) -> tuple[int, int]:
    """A rank's run of a linear's columns; ranks beyond their number, or that of their blocks, have none."""
    columns, unit = columns_of(linear)
    count = columns // unit
    ends = split_width(count, size, rank) if count >= size else (min(rank, count), min(rank + 1, count))
    return ends[0] * unit, ends[1] * unit


def at_blocks(linear: nn.Linear, spec: SliceSpec) -> bool:
    """Whether a linear's columns, where it is cut along them, are cut between blocks."""
    _, unit = columns_of(linear)
    return spec.dim == 0 or all(end % unit == 0 for ends in spec.ranges or () for end in ends)


def summands(comm: Communicator, own: Tensor, over: Over, layer: int | None) -> Tensor:
    """``[N, ...]``, the same on all ranks of a group, whose sum is that over them.

    Small tensors are gathered: that takes one message of each to each, in place of two behind another. Of others it is
    the sum alone.
    """
    if comm.direct(own):
        return comm.all_gather(own, over, operation="linear_sum", layer=layer)
    wide = own.to(torch.promote_types(own.dtype, torch.float32))
    return comm.all_reduce(wide, over, operation="linear_sum", layer=layer).to(own.dtype)[None]


def summed(parts: Tensor) -> Tensor:
    """The sum of summands, the same bits on all ranks, computed in float32 at least."""
    return parts.sum(0, dtype=torch.promote_types(parts.dtype, torch.float32)).to(parts.dtype)
