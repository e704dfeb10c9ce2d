"""What a rank computes alone, as cells to be timed: attention kernels, matrix products, copies and merges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from megakv.attention.backends import attend_block
from megakv.attention.backends import math as math_backend
from megakv.attention.merge import merge_, merge_parts
from megakv.costmodel.curves import AttentionTable, Curve
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.costmodel.stopwatch import Battery, Pool, Times

UNGROUPED_ROWS = (1, 4, 16, 64, 256, 1024)
GROUPED_ROWS = (16, 64, 256, 1024)
MATH_ROWS = (1, 16, 256)
SDPA_ROWS = (1,)
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
        """Weights of all together."""
        return sum(outputs * inputs for outputs, inputs in self.shapes)

    def pass_through(self, pool: Pool, tokens: int) -> Callable[[], object]:
        """A call in which so many tokens go through all of them, each time with other weights from memory."""
        x_TI = {inputs: pool.take(tokens, inputs).clone() for _, inputs in self.shapes}

        def call() -> None:
            for outputs, inputs in self.shapes:
                torch.nn.functional.linear(x_TI[inputs], pool.take(outputs, inputs))

        return call


@dataclass(frozen=True)
class KernelSizes:
    """Heads of one rank that attention is measured with."""

    head_dim: int  # Head dimension, query heads, and query heads that share a KV head.
    heads: int
    group: int
    kernel: str = "flash"  # As `AttentionTable` has it.

    @classmethod
    def of(cls, shape: AttentionShape) -> KernelSizes:
        """Those of a model's layer."""
        return cls(max(shape.key_dim, shape.value_dim), shape.heads, shape.heads // shape.kv_heads, shape.kernel)


@dataclass(frozen=True)
class TableCells:
    """Cells of one `AttentionTable`."""

    sizes: KernelSizes
    pool: Pool
    flops: float  # Operations per second to expect.
    longest_s: float  # Calls expected to take longer are left out.

    def call(self, rows: int, keys: int, *, causal: bool) -> object:
        """One kernel call on numbers from memory."""
        sizes, pool = self.sizes, self.pool
        kv_heads = sizes.heads // sizes.group
        q_HLD = pool.take(rows, sizes.heads, sizes.head_dim).transpose(0, 1)
        k_KSD = pool.take(kv_heads, keys, sizes.head_dim)
        v_KSD = pool.take(kv_heads, keys, sizes.head_dim)
        if sizes.kernel == "sdpa":
            return sdpa(q_HLD[None], k_KSD[None], v_KSD[None], is_causal=causal, enable_gqa=True)
        backend = math_backend if sizes.kernel == "math" else attend_block
        return backend(q_HLD, k_KSD, v_KSD, sizes.head_dim**-0.5, causal=causal)

    @property
    def _rows(self) -> tuple[int, ...]:
        if self.sizes.kernel == "sdpa":
            return SDPA_ROWS
        if self.sizes.kernel == "math":
            return MATH_ROWS
        return UNGROUPED_ROWS if self.sizes.group == 1 else GROUPED_ROWS

    def _short(self, pairs: int) -> bool:
        return 4 * self.sizes.heads * self.sizes.head_dim * pairs <= self.longest_s * self.flops

    def _keys(self, rows: int) -> tuple[int, ...]:
        return tuple(keys for keys in KEYS if keys == KEYS[0] or self._short(rows * keys))

    def _squares(self) -> tuple[int, ...]:
        if self.sizes.kernel == "sdpa":
            return SQUARES[:2]
        return tuple(rows for rows in SQUARES if rows in SQUARES[:2] or self._short(rows * rows))

    def add(self, battery: Battery) -> None:
        """Put the cells into a battery."""
        for rows in self._rows:
            for keys in self._keys(rows):
                battery.add(self.sizes, rows, keys, call=lambda r=rows, k=keys: self.call(r, k, causal=False))  # type: ignore[misc]
        for rows in self._squares():
            battery.add(self.sizes, rows, call=lambda r=rows: self.call(r, r, causal=True))  # type: ignore[misc]

    def table(self, times: Times) -> AttentionTable:
        """What they came to."""
        sizes, squares = self.sizes, self._squares()
        return AttentionTable(
            kernel=sizes.kernel,
            head_dim=sizes.head_dim,
            heads=sizes.heads,
            group=sizes.group,
            rows=self._rows,
            keys=KEYS,
            seconds=tuple(times.rising((sizes, rows, keys) for keys in self._keys(rows)) for rows in self._rows),
            causal=Curve(
                sizes=tuple(rows * rows for rows in squares), seconds=times.rising((sizes, rows) for rows in squares)
            ),
        )


@dataclass(frozen=True)
class CurveCells:
    """Cells of one `Curve`."""

    name: object  # What tells its cells from others.
    sizes: tuple[int, ...]
    make: Callable[[int], Callable[[], object]]  # The call to time, of a size.
    rising: bool = True  # Whether no size takes longer than a larger one.

    def add(self, battery: Battery) -> None:
        """Put the cells into a battery."""
        for size in self.sizes:
            battery.add(self.name, size, call=self.make(size))

    def curve(self, times: Times, *, scale: float = 1.0) -> Curve:
        """What they came to, times `scale`."""
        keys = [(self.name, size) for size in self.sizes]
        seconds = times.rising(keys) if self.rising else [times[key] for key in keys]
        return Curve(sizes=self.sizes, seconds=tuple(scale * value for value in seconds))


def matmul_cells(pool: Pool, matrices: Matrices) -> CurveCells:
    """Weight matrices from memory, over the tokens that go through them."""
    return CurveCells("matmul", TOKENS, lambda tokens: matrices.pass_through(pool, tokens), rising=False)


def copy_cells(pool: Pool) -> CurveCells:
    """Copying into one buffer again and again, over bytes."""

    def make(nbytes: int) -> Callable[[], object]:
        count = nbytes // pool.dtype.itemsize
        buffer = torch.empty(count, dtype=pool.dtype, device=pool.device)
        return lambda: buffer.copy_(pool.take(count))

    return CurveCells("copy", COPY_SIZES, make)


def fresh_copy_cells(pool: Pool) -> CurveCells:
    """Copying into newly allocated memory, over bytes."""
    return CurveCells("fresh copy", COPY_SIZES, lambda nbytes: lambda: pool.take(nbytes // pool.dtype.itemsize).clone())


def _outputs(device: torch.device, parts: int, elements: int) -> tuple[Tensor, Tensor]:
    """``[parts, 1, L, D]`` partial outputs of so many elements a part, and their log-sum-exps."""
    rows = max(1, elements // MERGE_DIM)
    return torch.rand(parts, 1, rows, MERGE_DIM, device=device), torch.rand(parts, 1, rows, device=device)


def merge_cells(device: torch.device) -> CurveCells:
    """Merging a partial output into another, over its elements."""

    def make(elements: int) -> Callable[[], object]:
        out, lse = _outputs(device, 2, elements)
        return lambda: merge_(out[0], lse[0], out[1], lse[1])

    return CurveCells("merge", MERGE_SIZES, make)


def combine_cells(device: torch.device, parts: int) -> CurveCells:
    """Merging stacked partial outputs, over the elements of all parts."""

    def make(elements: int) -> Callable[[], object]:
        out, lse = _outputs(device, parts, max(1, elements // parts))
        return lambda: merge_parts(out, lse)

    return CurveCells("combine", MERGE_SIZES, make)
