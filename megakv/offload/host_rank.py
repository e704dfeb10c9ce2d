"""The host's processor as one more rank: it attends to keys and values where they lie, and its part is merged.

This is pass-Q with a ring of two: queries go to the host, outputs with their log-sum-exp come back. A layer's queries
are known only once the layer has begun, so unlike transfers this cannot run ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
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
    """A layer's attention on the host, under way, from some query heads, all if None.

    Once it is merged, `seconds` says what it took, and `waited` between which moments of the accelerator's clock it was
    waited for.
    """

    def __init__(self, future: Future[tuple[Tensor, Tensor, float]], clock: Clock, heads: slice | None = None):
        self._future, self._clock, self._heads = future, clock, heads
        self.seconds = 0.0
        self.waited: tuple[Any, Any] | None = None

    def merge_into(self, out_HLD: Tensor, lse_HL: Tensor) -> None:
        """Merge it into what the accelerator attended to, in place, once it is there."""
        begun = self._clock.mark()
        out, lse, self.seconds = self._future.result()
        self.waited = begun, self._clock.mark()
        if self._heads is not None:
            out_HLD, lse_HL = out_HLD[self._heads], lse_HL[self._heads]
        merge_(out_HLD, lse_HL, *(upload(each.numpy(), out_HLD.device) for each in (out, lse)))


class HostParts(NamedTuple):
    """All parts of a layer, over latents that the accelerator expands if there are any."""

    parts: Sequence[HostPart]
    latent: LatentHeads | None

    def merge_into(self, out_HLD: Tensor, lse_HL: Tensor) -> None:
        """As `HostPart.merge_into`."""
        out, lse = out_HLD, lse_HL
        if self.latent is not None:
            out = out_HLD.new_zeros((*out_HLD.shape[:2], self.latent.rank))
            lse = torch.full_like(lse_HL, -torch.inf)
        for part in self.parts:
            part.merge_into(out, lse)
        if self.latent is not None:
            merge_(out_HLD, lse_HL, self.latent.lift(out), lse)


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
        heads: slice | None = None,
    ) -> HostPart:
        """Begin to attend from some heads' queries of whichever rank, and their tokens, to rows of a layer, and to
        `parts`.
        """
        scoring = call.scoring
        if heads is not None:
            q_HLD, scoring = q_HLD[heads], scoring.of(heads)
        job = _job(q_HLD.cpu(), tokens, scoring, store, rows, parts)
        return HostPart(self._pool.submit(_timed, job), self._clock, heads)

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
        job = _job(query, tokens, scoring, store, HostRows([runs] * sequences, slots, slots), ())
        return self._pool.submit(_timed, job).result()[2]

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


Job = Callable[[], tuple[Tensor, Tensor]]
"""Gives an output ``[H, L, Dv]`` and its log-sum-exp ``[H, L]``."""


def _timed(job: Job) -> tuple[Tensor, Tensor, float]:
    begun = time.perf_counter()
    return *job(), time.perf_counter() - begun


def _job(
    q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, store: RowFormat, rows: HostRows, parts: Sequence[Part]
) -> Job:
    """What the thread does."""
    together = _together(q_HLD, tokens, scoring, store, rows) if any(rows.runs) else None
    if together is not None and not parts:
        return together

    @torch.no_grad()
    def attend() -> tuple[Tensor, Tensor]:
        attention = PackedAttention(q_HLD, tokens, scoring, _value_dim(scoring, store))
        for part in chain(parts, () if together else _row_parts(store, rows)):
            attention.add(part)
        out, lse = attention.result()
        if together:
            merge_(out, lse, *together())
        return out, lse

    return attend


def _value_dim(scoring: Scoring, store: RowFormat) -> int:
    return store.head_shape.value_dim if scoring.value_columns is None else scoring.value_columns


def _row_parts(store: RowFormat, rows: HostRows) -> Iterator[KVPart]:
    """Rows in the model's type, sequence by sequence."""
    for sequence, (runs, slots, positions) in enumerate(zip(*rows, strict=True)):
        for first, piece in runs:
            step = len(piece) if store.quantiser is None else UNPACKED_ROWS
            for begin in range(0, len(piece), step):
                block = piece[begin : begin + step]
                span = slice(first + begin, first + begin + len(block))
                keys, values = store.heads_of(store.unpacked(block))
                yield KVPart(sequence, keys, values, slots[span], positions[span])


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
