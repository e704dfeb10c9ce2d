"""A decoder layer of the Llama kind around its attention, for many rows on processors, a block of rows at a time.

Where MegaKV's products are as fast as any, a block is two compiled calls. Else products are another library's, and what
lies between them is compiled. By itself PyTorch writes and reads each step of it, several times as wide as hidden
states, in memory that a long prompt takes anew: of a block it stays in caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megakv.attention.layer import LayerCalls, Weight
from megakv.injection.linears import all_reduce_of
from megakv.weights.packed_product import weight_product
from megakv.weights.products import Products, widened_product

LEAST_ROWS = 65
"""Rows from which on layers are computed so; of fewer, products are other ones."""
ROWS = 1024
"""Rows of a block, about: products of fewer take longer (measured, with hidden states of 576 to 2,048)."""
LEAST_BLOCK, BLOCK_ELEMENTS = 256, 1 << 22
"""Rows of a block of compiled calls at least, and what a feed-forward may have inside of it: more would be memory that
is taken anew in every call."""
MOST_WIDENED = 1 << 24
"""Elements of a layer's weights that are widened for all blocks at once."""

Sum = Callable[[Tensor], Tensor]
"""Over the ranks that have a part of a linear's columns each, its bias added."""


def sum_over(linear: nn.Linear) -> Sum | None:
    """Sum of a linear that is spread over tensor-parallel ranks; None of any other."""
    if (every := all_reduce_of(linear)) is None:
        return None
    bias = linear.bias
    return every if bias is None else lambda parts: every(parts) + bias


class Blocks:
    """How the rows of a model's layers are cut, and memory that these use one after the other."""

    def __init__(self) -> None:
        self.least_rows, self._rows = LEAST_ROWS, ROWS
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")

    def of(self, rows: int, most: int = ROWS) -> Iterator[slice]:
        """Of about the same length."""
        count = max(round(rows / min(self._rows, most)), 1)
        bounds = [rows * at // count for at in range(count + 1)]
        return map(slice, bounds, bounds[1:])

    def widened(self, parts: Sequence[Weight]) -> list[Weight]:
        """Their weights in float32, if they are few; it is the last call's no more. Those in blocks stay."""
        sizes = [0 if part.blocks else part.weight.numel() for part in parts]
        if sum(sizes) > MOST_WIDENED:
            return list(parts)
        if len(self._memory) < sum(sizes):
            # Whoever calls the model in inference mode, the next one may not.
            with torch.inference_mode(mode=False):
                self._memory = torch.empty(sum(sizes), dtype=torch.float32, device="cpu")
        found = []
        for part, memory in zip(parts, self._memory[: sum(sizes)].split(sizes), strict=True):
            bias = None if part.bias is None else part.bias.float()
            wide = part.weight if part.blocks else memory.view_as(part.weight).copy_(part.weight)
            found.append(replace(part, weight=wide, bias=bias))
        return found


class PromptLayer:
    """What one rank computes of a layer; numbers of 16 bits in float32, where a processor is faster with those."""

    def __init__(self, calls: LayerCalls, blocks: Blocks, products: Products):
        self._calls, self._blocks, self._products = calls, blocks, products
        self._dtype = torch.float32 if products.widens and not products.fuses else calls.dtype
        width = max(len(calls.weights.up.weight), 1)
        self._most = max(BLOCK_ELEMENTS // width, LEAST_BLOCK) if products.fuses else ROWS

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, wanted: Tensor | None = None) -> Tensor:
        """``[L, q + k + v]`` of hidden states ``[1, L, h]``, rotated by ``[1, L, D]``; of the rows that are not
        `wanted`, if that is said, queries may be zero.
        """
        weights, calls, rows = self._calls.weights, self._calls, x[0]
        packed = x.new_empty((len(rows), sum(calls.widths)))
        if self._products.fuses:
            for block in self._blocks.of(len(rows), self._most):
                calls.project(rows[block], cos[0, block], sin[0, block], whole=True, out=packed[block])
            return packed
        parts = self._weights([weights.q, weights.k, weights.v])
        columns = packed.split(calls.widths, dim=1)
        every = slice(None) if wanted is None else slice(1, None)
        for block in self._blocks.of(len(rows)):
            self._multiply(rows[block], parts[every], [to[block] for to in columns[every]])
        if wanted is not None:
            found = x.new_empty((len(wanted), calls.widths[0]))
            self._multiply(rows[wanted], parts[:1], [found])
            columns[0].zero_().index_copy_(0, wanted, found)
        calls.rotate(packed, cos, sin)
        return packed

    def _multiply(self, rows: Tensor, parts: Sequence[Weight], into: Sequence[Tensor]) -> None:
        _, normed = self._calls.normed(rows, None, self._dtype, behind=False)
        for part, to in zip(parts, into, strict=True):
            to.copy_(self._product(normed, part))

    def outputs(self, x: Tensor, attended: Tensor, sums: tuple[Sum | None, Sum | None]) -> Tensor:
        """The layer's hidden states ``[1, L, h]``, of such before attention and of what was attended to,
        ``[1, L, H D]``; with the sums of the output projection and of the feed-forward, where ranks have a part each.
        """
        weights, (sum_attended, sum_down) = self._calls.weights, sums
        o, gate, up, down = self._weights([weights.o, weights.gate, weights.up, weights.down])
        out = torch.empty_like(x)
        projected = None if sum_attended is None else sum_attended(self._projected(attended, o))
        parts = None if sum_down is None else torch.empty_like(x)
        for block in self._blocks.of(x.shape[1], self._most):
            rows = x[0, block]
            if self._products.fuses:
                added = (attended if projected is None else projected)[0, block].contiguous()
                # Behind attention, and what the feed-forward makes of it: their sum, where this rank has all of it.
                into = (None, out[0, block]) if parts is None else (out[0, block], parts[0, block])
                self._calls.feed_forward(rows, added, projected=projected is not None, whole=parts is None, into=into)
                continue
            if projected is None:
                added = self._product(attended[0, block].to(self._dtype), o)
            else:
                added = projected[0, block].to(self._dtype)
            middle, normed = self._calls.normed(rows, added, self._dtype, behind=True)
            inner = self._calls.gated(self._product(normed, gate), self._product(normed, up))
            found = self._product(inner, down)
            if parts is None:
                torch.add(middle, found.to(x.dtype), out=out[0, block])
            else:
                parts[0, block], out[0, block] = found, middle
        return out if parts is None or sum_down is None else out.add_(sum_down(parts))

    def _projected(self, attended: Tensor, o: Weight) -> Tensor:
        out = attended.new_empty((*attended.shape[:2], len(o.weight)))
        for block in self._blocks.of(attended.shape[1]):
            out[0, block] = self._product(attended[0, block].to(self._dtype), o)
        return out

    def _weights(self, parts: list[Weight]) -> list[Weight]:
        return parts if self._dtype == self._calls.dtype else self._blocks.widened(parts)

    def _product(self, x: Tensor, part: Weight) -> Tensor:
        if x.dtype != part.weight.dtype and not part.blocks:
            return widened_product(x, part.weight, part.bias)
        return weight_product(x, part, self._products, many=True)
