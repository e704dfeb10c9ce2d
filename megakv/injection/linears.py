"""Linears of a model's decoder layers and its output head on passes of few rows, as in decoding.

There a product reads every weight once for a handful of rows: what it takes is the time of reading them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.attention.linear import load_linear
from megakv.weights.placement.plan import decoder_layers
from megakv.weights.tensor_parallel import RowParallelLinear

FEW_ROWS = 64
"""Rows up to which a product goes through `rows_product`."""
LEAST_WEIGHT = 1 << 16
"""Elements of a weight below which reading it takes less than finding out how (measured)."""


def rows_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in]`` of few rows times ``[out, in]``: ``[..., out]`` in the type of x, which is the weight's too.

    The weight may be a view: of consecutive rows, or of consecutive columns, whose rows then lie further apart.
    """
    kernel, _ = load_linear()
    if kernel is not None and kernel.computes(x, weight, bias):
        return kernel(x, weight, bias)
    return F.linear(x, weight, bias)


def few_rows(x: Tensor) -> bool:
    """Whether an input has so few rows that its product goes through `rows_product`."""
    return x.numel() <= FEW_ROWS * x.shape[-1] and not torch.is_autocast_enabled(x.device.type)


class FewRowsForward:
    """In the place of the `forward` of one linear, whose class stays; what other inputs take is as before."""

    def __init__(self, linear: nn.Linear):
        self.linear = linear
        self.before = linear.forward
        self.sliced: Callable[[Tensor], Tensor | None] | None = None
        """What it computes instead in a pass in which ranks have slices of it; None of itself in others."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        if self.sliced is not None and (out := self.sliced(x)) is not None:
            return out
        return self.whole(x) if few_rows(x) else self.before(x)

    def whole(self, x: Tensor) -> Tensor:
        """The product of few rows; of a linear that is spread over tensor-parallel ranks, the sum over them."""
        linear: Any = self.linear
        if not isinstance(linear, RowParallelLinear):
            return rows_product(x, linear.weight, linear.bias)
        out = linear.all_reduce(rows_product(x, linear.weight))
        return out if linear.bias is None else out + linear.bias


class FewRowsLinears:
    """Another `forward` for the linears of a model's decoder layers, and its output head, until `remove`."""

    def __init__(self, model: PreTrainedModel):
        self.forwards: list[FewRowsForward] = []
        head = model.get_output_embeddings()
        for module in (*(inner for layer in _layers(model) for inner in layer.modules()), head):
            # Subclasses compute something else; what was replaced for a module alone is somebody else's.
            own = type(module) in (nn.Linear, RowParallelLinear) and "forward" not in vars(module)
            if own and module.weight.numel() >= LEAST_WEIGHT:
                forward = FewRowsForward(module)
                module.forward = forward
                self.forwards.append(forward)

    def remove(self) -> None:
        """Give the linears their own `forward` back."""
        for forward in self.forwards:
            del forward.linear.forward


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    try:
        return list(decoder_layers(model)[1])
    except ValueError:
        return []
