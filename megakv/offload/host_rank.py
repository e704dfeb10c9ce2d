"""The host's processor as one more rank: it attends to keys and values where they lie, and its part is merged.

This is pass-Q with a ring of two: queries go to the host, outputs with their log-sum-exp come back. A layer's queries
are known only once the layer has begun, so unlike transfers this cannot run ahead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megakv.attention.compiled import TYPES, load_kernel
from megakv.attention.merge import merge_
from megakv.attention.method import AttentionCall, KVPart, PackedAttention
from megakv.attention.partial import PartialAttention, Scoring
from megakv.attention.together import is_decoding, sees_all
from megakv.offload.clock import Clock, HostClock

if TYPE_CHECKING:
    from megakv.offload.store import TieredStore
    from megakv.sharding import TokenBlock


class Queries(NamedTuple):
    """What a layer's queries look like on this rank."""

    heads: int
    dim: int
    scoring: Scoring


class HostPart:
    """A layer's attention on the host, under way.

    Parameters
    ----------
    future : Future
        Gives outputs, log-sum-exps and seconds.
    device : torch.device
        Where the results are wanted.
    clock : Clock
        Of that device.

    Attributes
    ----------
    seconds : float
        What it took, once merged.
    waited : (object, object) or None
        Moments between which it was waited for, once merged.
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
        merge_(out_HLD, lse_HL, out.to(self._device), lse.to(self._device))


class HostRank:
    """A thread that attends.

    Parameters
    ----------
    threads : int, optional
        Cores that it computes with; as many as the process's other computations if None.
    clock : Clock, optional
        Of the accelerator; the host's own if left out.
    """

    def __init__(self, threads: int | None = None, clock: Clock | None = None):
        self._clock = clock or HostClock()
        self._pool = ThreadPoolExecutor(1, "host-rank", initializer=self._prepare, initargs=(threads,))

    @staticmethod
    def _prepare(threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)

    def start(
        self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock, store: TieredStore, on_host: list[int]
    ) -> HostPart:
        """Begin to attend to the first tokens of each sequence.

        Parameters
        ----------
        call : AttentionCall
        q_HLD : Tensor
            ``[H, L, D]`` queries, of whichever rank.
        tokens : TokenBlock
            Their tokens.
        store : TieredStore
            Of the layer.
        on_host : list of int
            Tokens, per sequence.
        """
        future = self._pool.submit(self._attend, q_HLD.cpu(), tokens, call, store, on_host)
        return HostPart(future, q_HLD.device, self._clock)

    @staticmethod
    @torch.no_grad()
    def _attend(
        queries: Tensor, tokens: TokenBlock, call: AttentionCall, store: TieredStore, on_host: list[int]
    ) -> tuple[Tensor, Tensor, float]:
        begun = time.perf_counter()
        together = _together(queries, tokens, call, store, on_host)
        if together is not None:
            return *together, time.perf_counter() - begun
        attention = PackedAttention(queries, tokens, call.scoring, call.value_dim)
        for sequence, count in enumerate(on_host):
            slots = call.table.slots(call.rank, sequence)
            positions = call.table.positions(call.rank, sequence)
            for first, rows in store.rows_in_memory(sequence, count):
                keys, values = store.heads_of(rows)
                span = slice(first, first + len(rows))
                attention.add(KVPart(sequence, keys, values, slots[span], positions[span]))
        return *attention.result(), time.perf_counter() - begun

    def measure(self, store: TieredStore, runs: Sequence[tuple[int, Tensor]], queries: Queries) -> float:
        """Seconds of attending to runs of rows of a store's shape with one query."""
        return self._pool.submit(self._timed, store, runs, queries).result()

    @staticmethod
    @torch.no_grad()
    def _timed(store: TieredStore, runs: Sequence[tuple[int, Tensor]], queries: Queries) -> float:
        # The kernel must be called as it will be: one row a head, and keys where they lie.
        query = torch.zeros(queries.heads, 1, queries.dim, dtype=store.dtype)
        count = sum(len(rows) for _, rows in runs)
        begun = time.perf_counter()
        partial = PartialAttention(query, np.array([count]), queries.scoring)
        for first, rows in runs:
            partial.add(*store.heads_of(rows), np.arange(first, first + len(rows)))
        _ = partial.out
        return time.perf_counter() - begun

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


def _together(
    queries: Tensor, tokens: TokenBlock, call: AttentionCall, store: TieredStore, on_host: list[int]
) -> tuple[Tensor, Tensor] | None:
    """All sequences in one kernel call, as calls by sequence take longer than attending to few tokens.

    None where there is more to it: several tokens of a sequence, hidden keys, terms added to scores, or no kernel.
    """
    kernel, _ = load_kernel()
    scoring, shape = call.scoring, store.head_shape
    plain = scoring.plain and queries.dtype == store.dtype and queries.dtype in TYPES
    if kernel is None or not plain or not kernel.few(queries.shape[0] // shape.heads, 1) or not is_decoding(tokens):
        return None
    sequences = tokens.sequence.tolist()
    held = [query for query, sequence in enumerate(sequences) if on_host[sequence]]
    slots = [call.table.slots(call.rank, sequences[query])[: on_host[sequences[query]]] for query in held]
    first, last = (np.array([each[index] for each in slots], dtype=np.int64) for index in (0, -1))
    if not sees_all(tokens.slot[held], first, last, scoring.window):
        return None
    rows = [[piece for _, piece in store.rows_in_memory(sequence, on_host[sequence])] for sequence in sequences]
    out, lse = kernel.rows(queries.transpose(0, 1)[:, :, None], rows, shape.heads, shape.value_dim, scoring.scale)
    return out[:, :, 0].transpose(0, 1), lse[:, :, 0].t()
