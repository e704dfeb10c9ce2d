"""The host's processor as one more rank: it attends to keys and values where they lie, and its part is merged.

This is pass-Q with a ring of two: queries go to the host, outputs with their log-sum-exp come back. A layer's queries
are known only once the layer has begun, so unlike transfers this cannot run ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megakv.attention.compiled import load_kernel
from megakv.attention.latent import LatentHeads
from megakv.attention.merge import merge_
from megakv.attention.method import AttentionCall, KVPart
from megakv.attention.partial import PackedAttention, Part, Scoring
from megakv.attention.visibility import sees_all
from megakv.base.device import Clock, HostClock, upload
from megakv.base.library import TYPES
from megakv.distributed.sharding import IntArray, TokenBlock
from megakv.offload.paged_rows import Runs
from megakv.offload.row_format import RowFormat

UNPACKED_ROWS = 1024
"""Of quantised rows, so many are in the model's type at a time, where the kernel does not unpack them itself."""


class HostRows(NamedTuple):
    """Rows of each sequence where they lie, and slots and positions of all that are numbered with them."""

    runs: Sequence[Runs]
    slots: Sequence[IntArray]
    positions: Sequence[IntArray]


class Queries(NamedTuple):
    """What a layer's queries look like on this rank."""

    group: int
    """To each KV head."""
    dim: int
    scoring: Scoring


class HostPart:
    """A layer's attention on the host, under way, for an accelerator with a clock.

    Once it is merged, `seconds` says what it took, and `waited` between which moments it was waited for.
    """

    def __init__(self, future: Future[tuple[Tensor, Tensor, float]], device: torch.device, clock: Clock):
        self._future = future
        self._device = device
        self._clock = clock
        self.seconds = 0.0
        self.waited: tuple[Any, Any] | None = None

    def merge_into(self, out_HLD: Tensor, lse_HL: Tensor) -> None:
        """Merge it into what the accelerator attended to, in place, once it is there."""
        begun = self._clock.mark()
        out, lse, self.seconds = self._future.result()
        self.waited = begun, self._clock.mark()
        merge_(out_HLD, lse_HL, upload(out.numpy(), self._device), upload(lse.numpy(), self._device))


class LiftedPart(NamedTuple):
    """The host's part over latents, for an accelerator that expands them."""

    part: HostPart
    latent: LatentHeads
    shape: tuple[int, int, int]
    """Of its output."""

    def merge_into(self, out_HLD: Tensor, lse_HL: Tensor) -> None:
        """As `HostPart.merge_into`."""
        out = out_HLD.new_zeros(self.shape)
        lse = lse_HL.new_full(self.shape[:2], -torch.inf)
        self.part.merge_into(out, lse)
        merge_(out_HLD, lse_HL, self.latent.lift(out), lse)


class HeadParts(NamedTuple):
    """Parts of some query heads each, all if None, for an accelerator that attends to all of them."""

    parts: Sequence[tuple[slice | None, HostPart | LiftedPart]]

    def merge_into(self, out_HLD: Tensor, lse_HL: Tensor) -> None:
        """As `HostPart.merge_into`."""
        for heads, part in self.parts:
            part.merge_into(*((out_HLD, lse_HL) if heads is None else (out_HLD[heads], lse_HL[heads])))


class HostRank:
    """A thread that attends, with so many cores: as many as the process's other computations if None.

    `queries` are what it is measured with; known after the first pass.
    """

    def __init__(self, threads: int | None = None, clock: Clock | None = None):
        self.queries: Queries | None = None
        self._clock = clock or HostClock()
        self._pool = ThreadPoolExecutor(1, "host-rank", torch.set_num_threads, (threads or torch.get_num_threads(),))

    def start(
        self,
        call: AttentionCall,
        q_HLD: Tensor,
        tokens: TokenBlock,
        store: RowFormat,
        rows: HostRows,
        parts: Sequence[Part] = (),
    ) -> HostPart:
        """Begin to attend from queries of whichever rank, and their tokens, to rows of a layer, and to `parts`."""
        q_HLD, device = q_HLD.cpu(), q_HLD.device
        own = partial(_job, q_HLD, tokens, call.scoring, store, rows)
        if parts:
            attention = PackedAttention(q_HLD, tokens, call.scoring, _value_dim(call.scoring, store))
            job: Job = partial(_with_parts, attention, parts, own() if any(rows.runs) else None)
        else:
            job = own()
        return HostPart(self._pool.submit(_timed, job), device, self._clock)

    def measure(self, store: RowFormat, runs: Runs, sequences: int = 1) -> float:
        """Seconds of attending to runs of rows of a store's shape with one query, for so many sequences alike."""
        assert self.queries is not None
        queries = self.queries
        count, each = sum(len(rows) for _, rows in runs), np.arange(sequences)
        slots = [np.arange(count)] * sequences
        tokens = TokenBlock(each, each * 0 + count, each * 0 + count, sequences)
        heads, scoring = queries.group * store.head_shape.heads, queries.scoring
        if scoring.alibi_slopes is not None:
            scoring = replace(scoring, alibi_slopes=scoring.alibi_slopes.new_zeros(heads))
        query = torch.zeros(sequences, heads, queries.dim, dtype=store.dtype).transpose(0, 1)
        job = _job(query, tokens, scoring, store, HostRows([runs] * sequences, slots, slots))
        return self._pool.submit(_timed, job).result()[2]

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


Job = Callable[[], tuple[Tensor, Tensor]]
"""Gives an output ``[H, L, Dv]`` and its log-sum-exp ``[H, L]``."""


def _timed(job: Job) -> tuple[Tensor, Tensor, float]:
    begun = time.perf_counter()
    return *job(), time.perf_counter() - begun


def _job(q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, store: RowFormat, rows: HostRows) -> Job:
    """What the thread does."""
    together = _together(q_HLD, tokens, scoring, store, rows)
    return together or partial(_one_by_one, q_HLD, tokens, scoring, store, rows)


@torch.no_grad()
def _with_parts(attention: PackedAttention, parts: Sequence[Part], rows: Job | None) -> tuple[Tensor, Tensor]:
    for part in parts:
        attention.add(part)
    out, lse = attention.result()
    if rows is not None:
        merge_(out, lse, *rows())
    return out, lse


def _value_dim(scoring: Scoring, store: RowFormat) -> int:
    return store.head_shape.value_dim if scoring.value_columns is None else scoring.value_columns


@torch.no_grad()
def _one_by_one(
    q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, store: RowFormat, rows: HostRows
) -> tuple[Tensor, Tensor]:
    attention = PackedAttention(q_HLD, tokens, scoring, _value_dim(scoring, store))
    for sequence, (runs, slots, positions) in enumerate(zip(*rows, strict=True)):
        for first, piece in runs:
            step = len(piece) if store.quantiser is None else UNPACKED_ROWS
            for begin in range(0, len(piece), step):
                block = piece[begin : begin + step]
                span = slice(first + begin, first + begin + len(block))
                keys, values = store.heads_of(store.unpacked(block))
                attention.add(KVPart(sequence, keys, values, slots[span], positions[span]))
    return attention.result()


def _together(q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, store: RowFormat, rows: HostRows) -> Job | None:
    """All sequences in one kernel call, as calls by sequence take longer than attending to few tokens.

    None where there is more to it: several tokens of a sequence, hidden keys, terms added to scores, or no kernel.
    """
    kernel, _ = load_kernel()
    shape = store.head_shape
    plain = scoring.plain and q_HLD.dtype == store.dtype and q_HLD.dtype in TYPES
    # Of packed rows the kernel takes keys and values that lie behind one another.
    plain = plain and (store.quantiser is None or scoring.value_columns is None)
    if kernel is None or not plain or not kernel.few(q_HLD.shape[0] // shape.heads, 1) or not tokens.single:
        return None
    pieces = [[piece for _, piece in rows.runs[sequence]] for sequence in tokens.sequences]
    for slot, sequence, own in zip(tokens.slot, tokens.sequences, pieces, strict=True):
        first = rows.runs[sequence][0][0] if own else 0
        if own and not sees_all(slot, rows.slots[sequence], first, sum(map(len, own)), scoring.window):
            return None
    packing = None if store.quantiser is None else store.quantiser.packing
    q_BHLD = q_HLD.transpose(0, 1).unsqueeze(2)
    call = kernel.rows(q_BHLD, pieces, shape.heads, _value_dim(scoring, store), scoring.scale, packing)
    # Views are made now: see `Decoding`.
    results = call.by_head()

    def attend() -> tuple[Tensor, Tensor]:
        call()
        return results

    return attend
