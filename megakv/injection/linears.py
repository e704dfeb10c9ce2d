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

from megakv.distributed.comm import Communicator, Over
from megakv.weights.packed_linear import PackedLinear
from megakv.weights.placement.plan import decoder_layers
from megakv.weights.placement.slices import Ranges
from megakv.weights.products import (
    PLAIN,
    TORCH,
    Products,
    autocast,
    few_rows,
    rows_product,
)
from megakv.weights.quantised import is_plain_linear
from megakv.weights.tensor_parallel import RowParallelLinear

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
            if is_plain_linear(module) and module.weight.numel() >= LEAST_WEIGHT:
                forward = FewRowsForward(module, products)
                module.forward = forward
                self.forwards.append(forward)
            elif isinstance(module, PackedLinear):
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


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    products: Products = PLAIN,
) -> Tensor:
    """A product with a slice of a weight, ``[..., in]`` and ``[out, in]``."""
    own = weight.stride(-1) == 1 and not autocast(x)
    return rows_product(x, weight, bias, products) if own else F.linear(x, weight, bias)


def cut_product(x: Tensor, weight: Tensor, bias: Tensor | None, ranges: Ranges) -> Tensor:
    """The outputs of some runs of a weight's rows, one behind the other."""
    parts = [product(x, weight[a:b], None if bias is None else bias[a:b]) for a, b in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class Slice:
    """Some rows, or columns, of a linear's weight: views, made anew only where it has been given another weight."""

    __slots__ = ("_bias", "_columns", "_linear", "_place", "_products", "_rows", "_view", "_weight")

    def __init__(
        self, linear: nn.Linear, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ):
        self._linear, self._rows, self._columns = linear, slice(*(rows or (None,))), slice(*(columns or (None,)))
        self._weight: Tensor | None = None
        self._place: tuple[int, int | None] | None = None
        forward = vars(linear).get("forward")
        self._products = forward.products if isinstance(forward, FewRowsForward) else PLAIN

    def product(self, x: Tensor) -> Tensor:
        """``[..., in]`` times it; with the bias of its rows, where they are whole."""
        return product(x, *self.views(), self._products)

    def views(self) -> tuple[Tensor, Tensor | None]:
        """Its part of the weight, and the bias of its rows, where they are whole."""
        weight, bias = self._linear.weight, self._linear.bias
        # What is assigned to `data` leaves a parameter what it was.
        place = weight.data_ptr(), None if bias is None else bias.data_ptr()
        if weight is not self._weight or place != self._place:
            whole = self._columns == slice(None)
            self._weight, self._place, self._view = weight, place, weight[self._rows, self._columns]
            self._bias = bias[self._rows] if bias is not None and whole else None
        return self._view, self._bias


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
