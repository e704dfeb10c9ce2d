"""Linears of a model's decoder layers and its output head on processors, which multiply as `Products` says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.weights.placement.plan import decoder_layers
from megakv.weights.products import (
    PLAIN,
    Products,
    autocast,
    few_rows,
    padded_product,
    rows_product,
    widened_product,
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
        if few_rows(x):
            return self._whole(x, functools.partial(rows_product, products=self.products))
        if x.device.type != "cpu" or x.element_size() != 2 or x.dtype != self.linear.weight.dtype or autocast(x):
            return self.before(x)
        return self._whole(x, widened_product if self.products.widens else padded_product)

    def _whole(self, x: Tensor, product: Callable[..., Tensor]) -> Tensor:
        """The product; of a linear that is spread over tensor-parallel ranks, the sum over them."""
        linear: Any = self.linear
        if not isinstance(linear, RowParallelLinear):
            return product(x, linear.weight, linear.bias)
        out = linear.all_reduce(product(x, linear.weight))
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
