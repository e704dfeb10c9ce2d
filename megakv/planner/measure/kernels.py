"""What a rank computes alone, as cases to be timed: attention kernels, matrix products, copies and merges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megakv.attention.backends import attend_block
from megakv.attention.merge import merge_, merge_parts
from megakv.costmodel.curves import AttentionTable, Curve
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.costmodel.stopwatch import Cases, Pool, rising
from megakv.weights.products import Products, rows_product

UNGROUPED_ROWS = (1, 4, 16, 64, 256, 1024)
GROUPED_ROWS = (16, 64, 256, 1024)
MATH_ROWS = (1, 16, 256)
SOFTCAP = 50.0
"""Where scores are more than scaled products, matrix products do the work, unless a compiled kernel does."""
KEYS = (16, 128, 1024, 8192)
SQUARES = (16, 64, 128, 256, 512, 1024, 2048)
TOKENS = (1, 2, 4, 16, 64, 256)
"""Two by itself: some libraries multiply two rows one by one, and four together."""
WEIGHT_WIDTH, LEAST_WIDTH = 2048, 1024
"""Matrices are measured no wider, and no narrower."""
# Beyond 32 MiB a C library asks the system for fresh pages every time, an order of magnitude slower.
COPY_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 5 << 23, 5 << 24)
MERGE_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23)
MERGE_DIM = 64


@dataclass(frozen=True)
class Matrices:
    """Weights that tokens go through one after another, as in a layer."""

    shapes: tuple[tuple[int, int], ...] = ((WEIGHT_WIDTH, WEIGHT_WIDTH),) * 2  # Outputs and inputs of each.

    @classmethod
    def of(cls, model: ModelShape) -> Matrices:
        """A model's: a projection of its attention, and its feed-forward; small ones take longer for a weight."""
        hidden, inner = (min(WEIGHT_WIDTH, max(LEAST_WIDTH, width)) for width in (model.hidden, model.intermediate))
        return cls(((hidden, hidden), *((inner, hidden),) * (model.feed_forward_tensors - 1), (hidden, inner)))

    @property
    def elements(self) -> int:
        return sum(outputs * inputs for outputs, inputs in self.shapes)

    def pass_through(self, pool: Pool, tokens: int) -> Callable[[], object]:
        """A call in which so many tokens go through all of them, each time with other weights from memory."""
        products = Products.measured(pool.dtype) if pool.device.type == "cpu" else Products()
        x_TI = {inputs: pool.take(tokens, inputs).clone() for _, inputs in self.shapes}

        # As engines compute: the kernel of few rows is not for training.
        @torch.no_grad()
        def call() -> None:
            for outputs, inputs in self.shapes:
                rows_product(x_TI[inputs], pool.take(outputs, inputs), None, products)

        return call


@dataclass(frozen=True)
class Kernel:
    """An attention kernel on numbers of the pool."""

    sizes: AttentionShape  # Heads and their dimensions; whatever their window and type.
    pool: Pool

    def call(self, rows: int, keys: int, *, causal: bool = False) -> object:
        sizes, pool = self.sizes, self.pool
        kv_heads = sizes.heads // sizes.group
        q_HLD = pool.take(rows, sizes.heads, sizes.head_dim).transpose(0, 1)
        k_KSD = pool.take(kv_heads, keys, sizes.head_dim)
        v_KSD = pool.take(kv_heads, keys, sizes.head_dim)
        softcap = SOFTCAP if sizes.kernel == "math" else None
        return attend_block(q_HLD, k_KSD, v_KSD, sizes.head_dim**-0.5, causal=causal, softcap=softcap)

    def operations(self, pairs: int) -> int:
        return 4 * self.sizes.heads * self.sizes.head_dim * pairs

    def table(self, cases: Cases, *, flops: float, longest_s: float) -> Callable[[], AttentionTable]:
        """Its table, once the cases have run; calls that would take longer at so many `flops` are left out."""
        sizes = self.sizes
        fused = UNGROUPED_ROWS if sizes.group == 1 else GROUPED_ROWS
        axis = MATH_ROWS if sizes.kernel == "math" else fused

        def short(pairs: int) -> bool:
            return self.operations(pairs) <= longest_s * flops

        blocks = [
            [cases.add(partial(self.call, rows, keys)) for keys in KEYS if keys == KEYS[0] or short(rows * keys)]
            for rows in axis
        ]
        squares = (*SQUARES[:2], *(rows for rows in SQUARES[2:] if short(rows * rows)))
        causal = [cases.add(partial(self.call, rows, rows, causal=True)) for rows in squares]
        return lambda: AttentionTable(
            kernel=sizes.kernel,
            head_dim=sizes.head_dim,
            heads=sizes.heads,
            group=sizes.group,
            rows=axis,
            keys=KEYS,
            seconds=tuple(map(rising, blocks)),
            causal=Curve(sizes=tuple(rows * rows for rows in squares), seconds=rising(causal)),
        )


def curve(cases: Cases, sizes: Sequence[int], make: Callable[[int], Callable[[], object]]) -> Callable[[], Curve]:
    """A curve, once the cases have run: `make` gives the call to time of each size."""
    taken = [cases.add(make(size)) for size in sizes]
    return lambda: Curve(sizes=tuple(sizes), seconds=rising(taken))


def rank_curves(cases: Cases, pool: Pool, matrices: Matrices, parts: int) -> dict[str, Callable[[], Curve]]:
    """Curves of what a rank does alone, by field of the profile; partial outputs of so many parts are stacked."""
    device, itemsize = pool.device, pool.dtype.itemsize

    def copying(nbytes: int) -> Callable[[], object]:
        buffer = torch.empty(nbytes // itemsize, dtype=pool.dtype, device=device)
        return lambda: buffer.copy_(pool.take(len(buffer)))

    def copying_fresh(nbytes: int) -> Callable[[], object]:
        return lambda: pool.take(nbytes // itemsize).clone()

    def bringing(nbytes: int) -> Callable[[], object]:
        held = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
        brought = torch.empty_like(held, device=device)
        return lambda: brought.copy_(held, non_blocking=True)

    def outputs(stacked: int, elements: int) -> tuple[Tensor, Tensor]:
        # [parts, 1, L, D] partial outputs of so many elements a part, and their log-sum-exps.
        rows = max(1, elements // MERGE_DIM)
        return torch.rand(stacked, 1, rows, MERGE_DIM, device=device), torch.rand(stacked, 1, rows, device=device)

    def merging(elements: int) -> Callable[[], object]:
        out, lse = outputs(2, elements)
        return lambda: merge_(out[0], lse[0], out[1], lse[1])

    def combining(elements: int) -> Callable[[], object]:
        return partial(merge_parts, *outputs(parts, max(1, elements // parts)))

    # Without an accelerator there is no link, or an emulated one, which its engine knows.
    link = {} if device.type == "cpu" else {"host_link": curve(cases, COPY_SIZES, bringing)}
    products = [cases.add(matrices.pass_through(pool, tokens)) for tokens in TOKENS]
    return link | {
        # Two tokens may take longer than four.
        "matmul": lambda: Curve(sizes=TOKENS, seconds=tuple(case.seconds / matrices.elements for case in products)),
        "copy_bytes": curve(cases, COPY_SIZES, copying),
        "copy_fresh": curve(cases, COPY_SIZES, copying_fresh),
        "merge": curve(cases, MERGE_SIZES, merging),
        "combine": curve(cases, MERGE_SIZES, combining),
    }
