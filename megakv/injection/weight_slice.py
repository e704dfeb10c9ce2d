"""Products with a part of a weight that a rank has whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakv.injection.linears import FewRowsForward
from megakv.weights.placement.slices import Ranges
from megakv.weights.products import PLAIN, Products, few_rows, rows_product


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    products: Products = PLAIN,
) -> Tensor:
    """A product with a slice of a weight, ``[..., in]`` and ``[out, in]``."""
    own = few_rows(x) and weight.stride(-1) == 1
    return rows_product(x, weight, bias, products) if own else F.linear(x, weight, bias)


def cut_product(x: Tensor, weight: Tensor, bias: Tensor | None, ranges: Ranges) -> Tensor:
    """The outputs of some runs of a weight's rows, one behind the other."""
    parts = [product(x, weight[a:b], None if bias is None else bias[a:b]) for a, b in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class Slice:
    """Some rows, or columns, of a linear's weight: views, made anew only where it has been given another weight."""

    __slots__ = ("_bias", "_columns", "_linear", "_products", "_rows", "_view", "_weight")

    def __init__(
        self, linear: nn.Linear, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ):
        self._linear, self._rows, self._columns = linear, slice(*(rows or (None,))), slice(*(columns or (None,)))
        self._weight: Tensor | None = None
        forward = vars(linear).get("forward")
        self._products = forward.products if isinstance(forward, FewRowsForward) else PLAIN

    def product(self, x: Tensor) -> Tensor:
        """``[..., in]`` times it; with the bias of its rows, where they are whole."""
        return product(x, *self.views(), self._products)

    def views(self) -> tuple[Tensor, Tensor | None]:
        """Its part of the weight, and the bias of its rows, where they are whole."""
        weight = self._linear.weight
        if weight is not self._weight:
            bias, whole = self._linear.bias, self._columns == slice(None)
            self._weight, self._view = weight, weight[self._rows, self._columns]
            self._bias = bias[self._rows] if bias is not None and whole else None
        return self._view, self._bias
