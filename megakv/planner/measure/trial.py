"""One attention layer on all ranks without a model: random queries, keys and values through the real methods."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.attention.methods import METHODS
from megakv.attention.partial import Scoring
from megakv.cache.dense import DenseStore
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.shape import AttentionShape
from megakv.costmodel.stopwatch import Pool
from megakv.distributed.comm import Communicator
from megakv.distributed.layouts import balanced, replicated, round_robin
from megakv.distributed.sharding import TokenBlock, TokenTable

TWIN_LAYERS = 4
"""Layers that take turns, so that no call finds the keys and values of the one before in a cache."""


def tokens(lengths: tuple[int, ...], first: tuple[int, ...]) -> TokenBlock:
    """``lengths[b]`` tokens of every sequence b, from slot ``first[b]`` on."""
    slots = [np.arange(start, start + length) for length, start in zip(lengths, first, strict=True)]
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    slot = np.concatenate(slots).astype(np.int64)
    return TokenBlock(sequence.astype(np.int64), slot, slot, len(lengths))


class TrialLayer:
    """An attention layer that serves one workload again and again, on numbers of the pool."""

    def __init__(self, comm: Communicator, shape: AttentionShape, workload: Workload, *, pool: Pool):
        self.comm = comm
        self.shape = shape
        self.workload = workload
        self._pool = pool
        self._calls: dict[str, Iterator[AttentionCall]] = {}
        self._methods = {name: entry.make() for name, entry in METHODS.items()}

    def run(self, method: str) -> tuple[Tensor, Tensor]:
        """Outputs ``[H, L, Dv]`` and log-sum-exps ``[H, L]`` of this rank's queries by one method."""
        return self._methods[method](self.call(method))

    def call(self, method: str) -> AttentionCall:
        """What the method is given next; layers take turns."""
        kind = "replicated" if method == "replicated" else "sharded"
        if kind not in self._calls:
            self._calls[kind] = itertools.cycle(self._make_calls(kind))
        return next(self._calls[kind])

    def _make_calls(self, kind: str) -> list[AttentionCall]:
        work, shape, rank = self.workload, self.shape, self.comm.mesh.cp_rank
        batch = len(work.new)
        table = TokenTable(work.size, batch)
        if sum(work.cached):
            table.extend(balanced(tokens(work.cached, (0,) * batch), work.size))
        held = table.counts() if sum(work.cached) else None
        deal = round_robin if max(work.new) < 2 * work.size else balanced
        layout = (replicated if kind == "replicated" else deal)(tokens(work.new, work.cached), work.size, held)
        table.extend(layout)
        rows = len(layout.tokens[rank])
        calls = []
        for layer in range(TWIN_LAYERS):
            store = DenseStore(batch)
            for sequence, count in enumerate(table.counts()[rank].tolist()):
                if count:
                    keys = self._pool.take(shape.kv_heads, count, shape.key_dim)
                    store.append(sequence, keys, self._pool.take(shape.kv_heads, count, shape.value_dim))
            queries = self._pool.take(rows, shape.heads, shape.key_dim).transpose(0, 1)
            calls.append(
                AttentionCall(
                    layer=layer,
                    q_HLD=queries,
                    k_KLD=self._pool.take(shape.kv_heads, rows, shape.key_dim),
                    v_KLD=self._pool.take(shape.kv_heads, rows, shape.value_dim),
                    layout=layout,
                    scoring=Scoring(scale=shape.key_dim**-0.5, window=shape.window),
                    kv_heads=shape.kv_heads,
                    key_dim=shape.key_dim,
                    value_dim=shape.value_dim,
                    store=store,
                    table=table,
                    comm=self.comm,
                )
            )
        return calls
