"""A step of a few tokens in one layer on processors: one compiled call stores the new rows, and attends to all of them.

Where a pass has a few new tokens of every sequence, as in decoding, all of its layers do the same. What they have in
common is found out once for the pass, and where a layer's rows lie, which its store knows, once for as long as they
stay there.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megakv.attention.compiled import DecodeKernel, RowTable, Run, located
from megakv.attention.merge import add_sinks
from megakv.attention.reference import Scoring, dense_attention
from megakv.base.library import TYPES, fault, load
from megakv.distributed.ledger import Ledger
from megakv.distributed.sharding import IntArray, Layout, TokenBlock, TokenTable

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class RowStore(Protocol):
    """What a step uses of a layer's `megakv.cache.store.KVStore`."""

    def in_place(self, new: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> RowTable | None: ...


class HasTable(Protocol):
    """What it uses of a `megakv.cache.cache.ShardedCache`, in a pass that has begun."""

    table: TokenTable


class StepKernel:
    """The compiled calls. An OSError says that their library cannot be loaded."""

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        number, whole, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        self.step, self.merge = library.megakv_step, library.megakv_merge
        self.step.argtypes = [number, pointer, pointer, ctypes.c_float, pointer, whole, number, number, pointer]
        self.merge.argtypes = [number, pointer, *(whole,) * 5, pointer, whole, pointer]
        self.step.restype = self.merge.restype = number


class TokenStep:
    """Attention of a pass that has a few new tokens of every sequence, on ranks that all have their queries.

    Of sequence b they are the packed rows from ``bounds[b]`` to before ``bounds[b + 1]``, their slots ascending.
    `stored` are the rows that this rank keeps; `seen` gives ``[L]``, for each, the first row that a window reaches of
    all that this rank was ever given of the sequence; `gather` the partial results of all ranks, ``[N, ...]``, for a
    layer's of this one, and is None on a rank that has everything; `compute` counts a stretch of computation. With
    `pairs`, which the processor must have, many rows of a sequence are attended to as in `PrefillKernel`.
    """

    def __init__(
        self,
        kernel: StepKernel,
        bounds: Sequence[int],
        stored: Sequence[int],
        seen: Callable[[int], IntArray],
        gather: Callable[[Tensor, int], Tensor] | None,
        compute: Callable[[str, int], AbstractContextManager[None]],
        *,
        pairs: bool = False,
    ):
        self._compute, self._pairs = compute, pairs
        self._kernel, self._seen, self._gather = kernel, seen, gather
        self.length = bounds[-1]
        """Packed rows of all sequences."""
        self.decodes = any(b - a == 1 for a, b in pairwise(bounds))
        """Whether some sequence has a single one."""
        self._begins, marks = array("q", bounds), bytearray(self.length)
        for row in stored:
            marks[row] = 1
        self._stored = (ctypes.c_char * self.length).from_buffer(marks)
        self._at = len(bounds) - 1, self._begins.buffer_info()[0], ctypes.addressof(self._stored)
        # New rows of each sequence that this rank keeps.
        self._new = [sum(marks[a:b]) for a, b in pairwise(bounds)]
        self.threads = torch.get_num_threads()
        self._windows: dict[int, IntArray] = {}

    def computes(self, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring) -> bool:
        """Whether a layer is for it: on all ranks alike."""
        kind, (_, heads, rows, dim), kv_heads = q_BHSD.dtype, q_BHSD.shape, k_BKSD.shape[1]
        return (
            rows == self.length
            and kind in TYPES
            and kind == k_BKSD.dtype == v_BKSD.dtype
            and dim == k_BKSD.shape[3]
            and q_BHSD.stride(3) == k_BKSD.stride(3) == v_BKSD.stride(3) == 1
            and DecodeKernel.few(heads // kv_heads, 1)
            and scoring.plain
            and scoring.scale > 0
            and scoring.value_columns is None
        )

    def rows(self, store: RowStore, k_KLD: Tensor, v_KLD: Tensor) -> RowTable | None:
        """Where those of a layer lie, with places for new ones of that kind."""
        return store.in_place(self._new, k_KLD, v_KLD)

    def held(self, table: RowTable, window: int | None) -> tuple[int, ...]:
        """What the kernel calls so, of a layer."""
        seen = windows = 0
        if window is not None:
            if window not in self._windows:
                self._windows[window] = np.ascontiguousarray(self._seen(window), dtype=np.int64)
            seen, windows = self._windows[window].ctypes.data, len(self._windows[window])
        return *self._at, seen, self.length, windows, *table.stepped

    def attend(
        self,
        layer: int,
        store: RowStore,
        q_BHSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        scoring: Scoring,
        sinks: Tensor | None,
    ) -> Tensor | None:
        """``[1, L, H, Dv]`` of what it `computes`; None where the store does not have its rows in one place."""
        table = self.rows(store, k_BKSD[0], v_BKSD[0])
        if table is None:
            return None
        (_, heads, rows, dim), (_, kv_heads, k_rows, _), value_dim = q_BHSD.shape, k_BKSD.shape, v_BKSD.shape[3]
        assert k_rows == v_BKSD.shape[2] == rows, "keys and values of other rows than queries"
        (_, q_head, q_row, _), (_, k_head, k_row, _) = q_BHSD.stride(), k_BKSD.stride()
        _, v_head, v_row, _ = v_BKSD.stride()
        step = array("q", (
            self._pairs and q_BHSD.dtype == torch.bfloat16, rows, heads, kv_heads, dim, value_dim,
            q_BHSD.data_ptr(), q_head, q_row, k_BKSD.data_ptr(), k_head, k_row, v_BKSD.data_ptr(), v_head, v_row,
        ))  # fmt: skip
        held, kind = array("q", self.held(table, scoring.window)), TYPES[q_BHSD.dtype]
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        out, alone = q_BHSD.new_empty((1, rows, heads, value_dim)), self._gather is None
        found = out if alone else q_BHSD.new_empty((rows, heads, value_dim + 1), dtype=torch.float32)
        with self._compute("attention", layer):
            code = self._kernel.step(
                kind, step.buffer_info()[0], held.buffer_info()[0], scoring.scale, *located(sinks), not alone,
                self.threads, found.data_ptr(),
            )  # fmt: skip
        if self._gather is not None and not code:
            parts = self._gather(found, layer)
            sizes = parts.numel(), len(parts), rows * heads, heads, value_dim
            code = self._kernel.merge(kind, parts.data_ptr(), *sizes, *located(sinks), out.data_ptr())
        if code:
            raise fault(code, f"partial results of {rows} rows and {heads} heads")
        return out


def token_step(layout: Layout, cache: HasTable, comm: Any, most_rows: int, *, pairs: bool = False) -> TokenStep | None:
    """That of a pass of a cache that has up to so many tokens, or one of each sequence, by this rank's `Communicator`.

    None, on all ranks, where the pass or the device is another, or where there is no kernel.
    """
    rank, size, kind = comm.mesh.cp_rank, comm.mesh.cp_size, comm.mesh.device.type
    tokens = layout.tokens[rank]
    if kind != "cpu" or torch.is_autocast_enabled(kind) or layout.wanted is not None:
        return None
    single = len(tokens) == tokens.batch and tokens.single
    if not (single or len(tokens) <= most_rows) or (size > 1 and not layout.replicated):
        return None
    kernel, _ = load_step()
    if kernel is None:
        return None

    def seen(window: int) -> IntArray:
        return seen_rows(tokens, cache.table, rank, window)

    def gather(partial: Tensor, layer: int) -> Tensor:
        return comm.cp_all_gather(partial, operation="replicated", layer=layer)

    stored = layout.kept_rows(rank)
    kept = range(len(tokens)) if stored is None else stored.tolist()
    bounds, over = tokens.bounds.tolist(), gather if size > 1 else None
    return TokenStep(kernel, bounds, kept, seen, over, comm.ledger.compute, pairs=pairs)


def seen_rows(tokens: TokenBlock, held: TokenTable, rank: int, window: int) -> IntArray:
    """``[L]`` for each token the first row that a window reaches, of all that a rank was given of its sequence."""
    first = tokens.slot - window
    rows = [
        np.searchsorted(held.slots(rank, sequence), first[tokens.run(sequence)], side="right")
        for sequence in range(tokens.batch)
    ]
    return np.concatenate(rows).astype(np.int64)


@functools.cache
def load_step() -> tuple[StepKernel | None, str]:
    """The calls, or None and why there are none; compiled, within seconds, if this machine does not have them yet."""
    return load("step", StepKernel, _problem)


class _Rows:
    """Some rows of tensors ``[B, K, S, D]``."""

    def __init__(self, k_BKSD: Tensor, v_BKSD: Tensor, rows: slice):
        pairs = [(k[:, rows], v[:, rows]) for k, v in zip(k_BKSD, v_BKSD, strict=True)]
        self._table = RowTable.of([[Run.of(k, v)] for k, v in pairs], [rows.start] * len(pairs), k_BKSD.dtype)

    def in_place(self, new: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> RowTable:
        return self._table


def _problem(kernel: StepKernel) -> str:
    """What is wrong with their results on a small example; empty if nothing is."""
    # Whatever device is the default one.
    generator = torch.Generator("cpu").manual_seed(0)
    rows, cut, window = 70, 40, 50
    # Sequences of one new row, and of three.
    bounds, behind = (0, 1, 4, 5), (0, 2, 1, 0, 0)
    batch, length = len(bounds) - 1, bounds[-1]
    of_row = [sequence for sequence in range(batch) for _ in range(*bounds[sequence : sequence + 2])]
    for dtype, tolerance in TOLERANCE.items():
        q, k, v, sinks = (
            torch.randn(shape, generator=generator, device="cpu").to(dtype)
            for shape in ((length, 6, 37), (batch, 2, rows, 37), (batch, 2, rows, 21), (6,))
        )
        places = [(sequence, rows - 1 - back) for sequence, back in zip(of_row, behind, strict=True)]
        new = [torch.stack([each[b, :, slot] for b, slot in places], 1)[None] for each in (k, v)]
        partial: list[Tensor] = []

        def gather(own: Tensor, layer: int, partial: list[Tensor] = partial) -> Tensor:
            partial.append(own)
            return torch.stack(partial)

        def attended(
            part: slice, stored: Sequence[int], scoring: Scoring, gather: Any, q: Tensor = q, k: Tensor = k,
            v: Tensor = v, new: Any = new, sinks: Tensor = sinks,
        ) -> Tensor | None:  # fmt: skip
            held = torch.zeros_like(k), torch.zeros_like(v)
            for b, (first, last) in enumerate(pairwise(bounds)):
                there = rows - (last - first if stored else 0)
                for mine, given in zip(held, (k, v), strict=True):
                    mine[b, :, :there] = given[b, :, :there]
            seen = np.array([rows - back - window for back in behind])
            step = TokenStep(kernel, bounds, stored, lambda window: seen, gather, Ledger().compute)
            return step.attend(0, _Rows(*held, part), q.transpose(0, 1)[None], new[0], new[1], scoring, sinks)

        every = range(length)
        attended(slice(0, cut), (), Scoring(0.2), gather)
        found = (
            (attended(slice(cut, rows), every, Scoring(0.2), gather), rows),
            (attended(slice(0, rows), every, Scoring(0.2, window), None), window),
        )
        for (out, reach), (row, (b, slot)) in product(found, enumerate(places)):
            see = slice(max(0, slot + 1 - reach), slot + 1)
            dense, lse = dense_attention(q[row, :, None], k[b, :, see], v[b, :, see], 0.2)
            expected = add_sinks(dense, lse, sinks)[:, 0]
            if out is None or not torch.allclose(out[0, row].double(), expected, rtol=tolerance, atol=tolerance):
                return f"compiled, a step of few tokens in {dtype} differs from the reference by more than {tolerance}"
    return ""
