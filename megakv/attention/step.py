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

from megakv.attention.compiled import DecodeKernel, RowTable, RowTables, Run, located
from megakv.attention.merge import add_sinks
from megakv.attention.reference import Scoring, dense_attention
from megakv.base.library import TYPES, fault, load
from megakv.distributed.ledger import Ledger
from megakv.distributed.sharding import IntArray, Layout, TokenBlock, TokenTable

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class RowStore(Protocol):
    """What a step uses of a layer's `megakv.cache.store.KVStore`."""

    def in_place(self, new: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> RowTable | None: ...


class HasPlaces(Protocol):
    """What it uses of a `megakv.cache.cache.ShardedCache`."""

    def places(self, new: Sequence[int], like: tuple[Tensor, Tensor]) -> RowTables | None: ...


class SpreadRows(Protocol):
    """What it uses of a `megakv.attention.spread.SpreadRows`."""

    address: int
    rows: int


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
    `pairs`, which the processor must have, many rows of a sequence are attended to as in `PrefillKernel`. Of a prompt
    that is `spread` over ranks, by a window, every rank has a part of the queries, and a call of layers all keys.
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
        spread: Callable[[int | None], SpreadRows] | None = None,
    ):
        self._compute, self._pairs, self._spread = compute, pairs, spread
        self._spreads: dict[int | None, SpreadRows] = {}
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

    def _common(self, window: int | None) -> tuple[int, ...]:
        """What the kernel is told of the pass."""
        seen = windows = 0
        if window is not None:
            if window not in self._windows:
                self._windows[window] = np.ascontiguousarray(self._seen(window), dtype=np.int64)
            seen, windows = self._windows[window].ctypes.data, len(self._windows[window])
        return *self._at, seen, self.length, windows

    def held(self, tables: RowTables, window: int | None) -> IntArray:
        """``[layers, 11]`` of what the kernel calls so."""
        held = np.empty((len(tables), 11), dtype=np.int64)
        held[:, :6], held[:, 6:] = self._common(window), tables.stepped
        return held

    def spread(self, window: int | None) -> SpreadRows | None:
        """Where all ranks' rows are, given the window; None where ranks have the same queries."""
        if self._spread is None:
            return None
        if window not in self._spreads:
            self._spreads[window] = self._spread(window)
        return self._spreads[window]

    def places(self, cache: HasPlaces, like: Tensor) -> RowTables | None:
        """Where rows of all layers lie, with places for the new ones, whose keys and values are like that one."""
        return cache.places(self._new, (like, like))

    def attend(
        self,
        layer: int,
        table: RowTable,
        q_BHSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        scoring: Scoring,
        sinks: Tensor | None,
    ) -> Tensor:
        """``[1, L, H, Dv]`` of what it `computes`, given where the layer's `rows` lie."""
        (_, heads, rows, dim), (_, kv_heads, k_rows, _), value_dim = q_BHSD.shape, k_BKSD.shape, v_BKSD.shape[3]
        assert k_rows == v_BKSD.shape[2] == rows, "keys and values of other rows than queries"
        (_, q_head, q_row, _), (_, k_head, k_row, _) = q_BHSD.stride(), k_BKSD.stride()
        _, v_head, v_row, _ = v_BKSD.stride()
        step = array("q", (
            self._pairs and q_BHSD.dtype == torch.bfloat16, rows, heads, kv_heads, dim, value_dim,
            q_BHSD.data_ptr(), q_head, q_row, k_BKSD.data_ptr(), k_head, k_row, v_BKSD.data_ptr(), v_head, v_row,
        ))  # fmt: skip
        held, kind = array("q", (*self._common(scoring.window), *table.stepped)), TYPES[q_BHSD.dtype]
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
        return comm.all_gather(partial, operation="replicated", layer=layer)

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


def _problem(kernel: StepKernel) -> str:
    """What is wrong with their results on a small example; empty if nothing is."""
    for dtype, tolerance in TOLERANCE.items():
        if not _agrees(kernel, dtype, tolerance):
            return f"compiled, a step of few tokens in {dtype} differs from the reference by more than {tolerance}"
    return ""


def _agrees(kernel: StepKernel, dtype: torch.dtype, tolerance: float) -> bool:
    """Whether they give what the reference does: on one rank with a window, and on two that hold a part of rows."""
    # Whatever device is the default one.
    generator = torch.Generator("cpu").manual_seed(0)
    rows, cut, window, partial = 70, 40, 50, list[Tensor]()
    # Sequences of one new row, and of three.
    bounds, places = (0, 1, 4, 5), ((0, 69), (1, 67), (1, 68), (1, 69), (2, 69))
    q, k, v, sinks = (
        torch.randn(shape, generator=generator, device="cpu").to(dtype)
        for shape in ((len(places), 6, 37), (3, 2, rows, 37), (3, 2, rows, 21), (6,))
    )
    new = [torch.stack([each[b, :, slot] for b, slot in places], 1)[None] for each in (k, v)]
    seen = np.array([slot + 1 - window for _, slot in places])

    def gather(own: Tensor, layer: int) -> Tensor:
        partial.append(own)
        return torch.stack(partial)

    def attended(part: slice, stored: Sequence[int], scoring: Scoring, gather: Any = None) -> Tensor:
        held = k.clone(), v.clone()
        for row, each in product(stored, held):
            # They are to be written.
            each[places[row][0], :, places[row][1]] = 0
        runs = [[Run.of(keys[:, part], values[:, part])] for keys, values in zip(*held, strict=True)]
        step = TokenStep(kernel, bounds, stored, lambda window: seen, gather, Ledger().compute)
        table = RowTable.of(runs, [part.start] * len(runs), dtype)
        return step.attend(0, table, q.transpose(0, 1)[None], new[0], new[1], scoring, sinks)

    every = range(len(places))
    attended(slice(0, cut), (), Scoring(0.2), gather)
    found = (
        (attended(slice(cut, rows), every, Scoring(0.2), gather), rows),
        (attended(slice(0, rows), every, Scoring(0.2, window)), window),
    )
    for (out, reach), (row, (b, slot)) in product(found, enumerate(places)):
        see = slice(max(0, slot + 1 - reach), slot + 1)
        expected = add_sinks(*dense_attention(q[row, :, None], k[b, :, see], v[b, :, see], 0.2), sinks)[:, 0]
        if not torch.allclose(out[0, row].double(), expected, rtol=tolerance, atol=tolerance):
            return False
    return True
