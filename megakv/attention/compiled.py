"""Attention of a few query rows on processors, in C++.

Decoding reads all keys and values for little computation: reading them is what a token costs. PyTorch's kernel wants
16-bit ones turned into float32 in memory first, and is far from the speed of memory where query rows are few.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakv.attention.reference import dense_attention, difference
from megakv.base.library import TYPES, fault, load

TOLERANCE = 1e-5
MAX_ROWS, MAX_HEADS = 32, 128
"""Query rows of a KV head, and query heads of one for one query, beyond which products are as fast (measured)."""


def laid(x_KSD: Tensor) -> tuple[int, int, int]:
    """Elements from one head to the next, from one token to the next, and of all memory that they take."""
    (heads, tokens, dim), (head, step, _) = x_KSD.shape, x_KSD.stride()
    return head, step, (heads - 1) * head + (tokens - 1) * step + dim


def located(numbers: Tensor | None) -> tuple[int | None, int]:
    """Address and length of some numbers, if there are any."""
    return (None, 0) if numbers is None else (numbers.data_ptr(), len(numbers))


class Run(NamedTuple):
    """Keys and values of some tokens of a sequence: the addresses of the first ones, and how many there are.

    Strides are the elements from one head, or token, to the next; sizes those that there are from the address on.
    """

    k: int
    v: int
    tokens: int
    k_head: int
    k_step: int
    v_head: int
    v_step: int
    k_size: int
    v_size: int

    @classmethod
    def of(cls, k_KSD: Tensor, v_KSD: Tensor) -> Run:
        """All tokens of keys and values that `DecodeKernel.reads`."""
        (k_head, k_step, k_size), (v_head, v_step, v_size) = laid(k_KSD), laid(v_KSD)
        return cls(k_KSD.data_ptr(), v_KSD.data_ptr(), k_KSD.shape[1], k_head, k_step, v_head, v_step, k_size, v_size)

    def part(self, first: int, tokens: int, itemsize: int) -> Run:
        """So many tokens from one on, whose elements have so many bytes."""
        k, v, (*_, k_size, v_size) = first * self.k_step, first * self.v_step, self
        at = self.k + k * itemsize, self.v + v * itemsize
        return Run(*at, tokens, self.k_head, self.k_step, self.v_head, self.v_step, k_size - k, v_size - v)


RUN_WORDS = len(Run._fields)


class Packing(NamedTuple):
    """How rows are packed: bits of each of `width` elements, and elements that share a step and a smallest value.

    Those two are in float16, not float32, where `halves` is 1.
    """

    bits: int
    group: int
    width: int
    halves: int


class RowTable:
    """Where rows of several sequences lie: the one table that kernels of processors, CUDA graphs and batches read.

    `words` are the `Run`s of all sequences, of which each has such `counts`; `gone` the rows that they begin with;
    `held` is what lies there, if nobody else keeps it.
    """

    def __init__(
        self,
        words: array[int],
        counts: Sequence[int],
        gone: Sequence[int] = (),
        dtype: torch.dtype | None = None,
        held: object = None,
    ):
        self.words, self.counts, self.gone, self.dtype, self._held = words, counts, gone, dtype, held
        self._bounds = array("q", (0, *accumulate(counts), *gone))
        (bounds, _), (runs, length), sequences = self._bounds.buffer_info(), words.buffer_info(), len(counts)
        behind = bounds + (sequences + 1) * self._bounds.itemsize
        self.decoded = bounds, sequences + 1, runs, length // RUN_WORDS
        """Addresses of bounds and runs, with the lengths of both, as `megakv_decode` takes them."""
        self.stepped = sequences, bounds, behind, runs, length // RUN_WORDS
        """The same with the address of first rows, as `megakv_step` does."""

    @classmethod
    def of(cls, runs: Sequence[Sequence[Run]], gone: Sequence[int] = (), dtype: torch.dtype | None = None) -> RowTable:
        """That of every sequence's runs."""
        return cls(array("q", chain.from_iterable(chain.from_iterable(runs))), list(map(len, runs)), gone, dtype)

    @classmethod
    def at(cls, runs: NDArray[np.int64], counts: Sequence[int] | None = None, held: object = None) -> RowTable:
        """That of ``[n, 9]`` runs, of which each is a sequence of its own where no counts are given."""
        return cls(array("q", runs.tobytes()), [1] * len(runs) if counts is None else counts, held=held)

    @classmethod
    def joined(cls, tables: Sequence[RowTable]) -> RowTable:
        """That of the sequences of several tables, behind one another, as they are now."""
        counts, gone, words = list[int](), list[int](), array("q")
        for table in tables:
            counts += table.counts
            gone += table.gone
            words += table.words
        return cls(words, counts, gone, tables[0].dtype)

    def add(self, sequence: int, rows: int) -> None:
        """So many more rows lie behind the last one of a sequence."""
        self.words[self._bounds[sequence + 1] * RUN_WORDS - RUN_WORDS + 2] += rows


class RowTables:
    """`RowTable`s of several layers: ``[layers, 5]`` of what each calls `stepped`; `held` is what they point to."""

    def __init__(self, stepped: NDArray[np.int64], held: object):
        self.stepped, self._held = stepped, held

    def __len__(self) -> int:
        return len(self.stepped)

    @classmethod
    def of(cls, tables: Sequence[RowTable]) -> RowTables:
        """Tables that each layer made by itself."""
        return cls(np.array([table.stepped for table in tables], dtype=np.int64), tables)

    @classmethod
    def at(cls, words: NDArray[np.int64], counts: NDArray[np.int64], gone: NDArray[np.int64]) -> RowTables:
        """Tables of ``[layers, n, 9]`` runs, of which sequences have ``[B]`` in every layer; ``[layers, B]`` rows are
        gone.
        """
        (layers, runs, _), bounds = words.shape, np.concatenate([[0], np.cumsum(counts)])
        stepped = np.empty((layers, 5), dtype=np.int64)
        stepped[:] = len(counts), bounds.ctypes.data, gone.ctypes.data, words.ctypes.data, runs
        stepped[:, 2] += np.arange(layers) * gone.strides[0]
        stepped[:, 3] += np.arange(layers) * words.strides[0]
        return cls(stepped, (words, bounds, gone))


class Decoding:
    """A call of the kernel, ready to be made: its arguments before and behind the number of threads.

    Whoever makes it needs Python for nothing else: a thread beside one that is busy in Python waits at every step.
    `held` is what the arguments point to.
    """

    def __init__(self, call: Callable[..., int], before: tuple[object, ...], out: Tensor, lse: Tensor, held: object):
        self._call, self._before, self._held = call, before, held
        self._behind = out.data_ptr(), lse.data_ptr()
        self.out, self.lse = out, lse

    def by_head(self) -> tuple[Tensor, Tensor]:
        """``[H, B, Dv]`` and ``[H, B]`` views of the results for one query row of each sequence."""
        return self.out.select(2, 0).transpose(0, 1), self.lse.select(2, 0).t()

    def __call__(self) -> tuple[Tensor, Tensor]:
        """``[B, H, L, Dv]`` and ``[B, H, L]``, or without the first dimension, as the queries; with as many threads as
        PyTorch uses in this one. 0 and -inf for a sequence without runs.
        """
        if code := self._call(*self._before, torch.get_num_threads(), *self._behind):
            raise fault(code, f"partial results of {list(self.lse.shape)} sequences, heads and rows")
        return self.out, self.lse


class DecodeKernel:
    """Queries that see all keys, few of them for each KV head, with as many threads as PyTorch uses in the calling one.

    An OSError says that the compiled library cannot be loaded.
    """

    def __init__(self, path: Path):
        self._call = ctypes.CDLL(str(path)).megakv_decode
        number, whole, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        self._call.argtypes = [
            number, pointer, pointer, whole, pointer, whole, pointer, *(whole,) * 5, ctypes.c_float, number, pointer,
            pointer,
        ]  # fmt: skip
        self._call.restype = ctypes.c_int

    @staticmethod
    def computes(q_HLD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> bool:
        """Whether these are for it: few rows, all of one type that it knows, each in one piece."""
        few = DecodeKernel.few(q_HLD.shape[0] // k_KSD.shape[0], q_HLD.shape[1])
        return few and DecodeKernel.reads(q_HLD, k_KSD, v_KSD)

    @staticmethod
    def reads(q_HLD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> bool:
        """Whether they fit together: it reads addresses, so what does not must not come to it."""
        fits = q_HLD.dtype == k_KSD.dtype == v_KSD.dtype and q_HLD.shape[2] == k_KSD.shape[2]
        return fits and q_HLD.dtype in TYPES and k_KSD.stride(2) == v_KSD.stride(2) == 1

    @staticmethod
    def few(group: int, length: int) -> bool:
        """Whether it is the fastest for so many queries of so many heads that share a KV head."""
        return group * length <= MAX_ROWS or (length == 1 and group <= MAX_HEADS)

    def __call__(self, q_HLD: Tensor, k_KSD: Tensor, v_KSD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """``[H, L, Dv]`` and the natural log-sum-exp ``[H, L]``, float32, of one sequence that it `computes`."""
        return self.ready(q_HLD, RowTable.of([[Run.of(k_KSD, v_KSD)]]), k_KSD.shape[0], v_KSD.shape[2], scale)()

    def rows(
        self,
        q_BHLD: Tensor,
        rows: Sequence[Sequence[Tensor]],
        kv_heads: int,
        value_dim: int,
        scale: float,
        packing: Packing | None = None,
    ) -> Decoding:
        """A call for several sequences, whose keys and values lie token by token.

        Each has pieces ``[n, K * D + K * Dv]`` in the queries' type: a token's keys, then its values; or such rows in
        the bytes of a packing. Of latents, which are one KV head's, they are ``[n, D]``, and the values their first
        columns.
        """
        if packing is not None:
            # A row is a key, and there are no values.
            packed = [[Run.of(piece[None], piece[None, :, :0]) for piece in own] for own in rows]
            return self.ready(q_BHLD, RowTable.of(packed), kv_heads, value_dim, scale, packing)
        dim = q_BHLD.shape[-1]
        width = next((piece.shape[1] for own in rows for piece in own), 0)
        before = 0 if width == kv_heads * dim else kv_heads * dim

        def run(piece: Tensor) -> Run:
            at, size = piece.data_ptr(), piece.numel()
            values = at + before * piece.element_size()
            return Run(at, values, len(piece), dim, width, value_dim, width, size, size - before)

        return self.ready(q_BHLD, RowTable.of([list(map(run, own)) for own in rows]), kv_heads, value_dim, scale)

    def ready(
        self,
        q_BHLD: Tensor,
        table: RowTable,
        kv_heads: int,
        value_dim: int,
        scale: float,
        packing: Packing | None = None,
    ) -> Decoding:
        """A call for the queries ``[B, H, L, D]`` of several sequences, or ``[H, L, D]`` of one.

        Keys and values are in the queries' type, or packed, where the table says, and must stay there.
        """
        *several, heads, length, dim = shape = q_BHLD.shape
        sequences = several[0] if several else 1
        q = q_BHLD.to(torch.float32).contiguous()
        out, lse = q.new_empty((*shape[:-1], value_dim)), q.new_empty(shape[:-1])
        words = None if packing is None else np.array(packing, dtype=np.int64)
        before = (
            TYPES[q_BHLD.dtype], None if words is None else words.ctypes.data, q.data_ptr(), sequences,
            *table.decoded, kv_heads, heads // kv_heads * length, dim, value_dim, scale,
        )  # fmt: skip
        return Decoding(self._call, before, out, lse, (q, table, words))


@functools.cache
def load_kernel() -> tuple[DecodeKernel | None, str]:
    """The kernel, or None and why there is none; compiled, within seconds, if this machine does not have it yet."""
    return load("decode", DecodeKernel, _problem)


def _problem(kernel: DecodeKernel) -> str:
    """What is wrong with its results on a small example; empty if nothing is."""
    # Whatever device is the default one.
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = (10, 1, 83), (2, 131, 83), (2, 131, 70)
    for dtype in TYPES:
        q, k, v = (torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes)
        found = difference(kernel(q, k, v, 0.1), dense_attention(q, k, v, 0.1), TOLERANCE)
        if found:
            return f"compiled, {found} for {dtype}"
    q, step, low = (
        torch.rand(shape, generator=generator, device="cpu") for shape in ((1, 10, 1, 24), (131, 12), (131, 12))
    )
    for bits in (4, 8):
        levels = torch.randint(1 << bits, (131, 96), generator=generator, dtype=torch.uint8, device="cpu")
        packed = levels[:, 0::2] | levels[:, 1::2] << 4 if bits == 4 else levels
        rows = torch.cat((packed, torch.cat((step, low), dim=1).view(torch.uint8)), dim=1)
        k, v = (
            (levels.unflatten(1, (12, 8)) * step[..., None] + low[..., None]).view(131, 4, 24).transpose(0, 1).split(2)
        )
        out, lse = kernel.rows(q, [[rows]], 2, 24, 0.1, Packing(bits, 8, 96, 0))()
        found = difference((out[0], lse[0]), dense_attention(q[0], k, v, 0.1), TOLERANCE)
        if found:
            return f"compiled, {found} for rows in {bits} bits"
    return ""
