"""What a distributed attention method is given, and what it must return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megakv.attention.partial import PartialAttention, Scoring
from megakv.cache import TokenTable
from megakv.comm import Communicator
from megakv.sharding import IntArray, Layout, TokenBlock
from megakv.stores import KVStore


@dataclass(frozen=True)
class KVPart:
    """Keys and values of one sequence on one rank, with the coordinates that causality is decided from.

    Parameters
    ----------
    sequence : int
        Batch row.
    k_KSD, v_KSD : Tensor
        ``[K, S, D]`` and ``[K, S, Dv]``.
    slots, positions : IntArray
        ``[S]``, slots ascending.
    """

    sequence: int
    k_KSD: Tensor
    v_KSD: Tensor
    slots: IntArray
    positions: IntArray


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention over all context-parallel ranks.

    The new keys and values are in the store already, but for a layout that is gathered on the last rank: there the
    method puts them into its store.

    Parameters
    ----------
    layer : int
        Index of the layer.
    q_HLD, k_KLD, v_KLD : Tensor
        ``[H, L, D]`` queries, ``[K, L, D]`` keys and ``[K, L, Dv]`` values of this rank's tokens, packed.
    layout : Layout
        The new tokens on every rank.
    scoring : Scoring
        Scale, window, soft cap and bias of the layer.
    kv_heads, key_dim, value_dim : int
        Shape of the keys and values on every rank of the ring.
    store : KVStore
        This rank's keys and values of the layer.
    table : TokenTable
        The cached tokens on every rank, new ones included.
    comm : Communicator
    """

    layer: int
    q_HLD: Tensor
    k_KLD: Tensor
    v_KLD: Tensor
    layout: Layout
    scoring: Scoring
    kv_heads: int
    key_dim: int
    value_dim: int
    store: KVStore
    table: TokenTable
    comm: Communicator

    @property
    def rank(self) -> int:
        """This rank's context-parallel index."""
        return self.comm.mesh.cp_rank

    @property
    def size(self) -> int:
        """Context-parallel degree."""
        return self.comm.mesh.cp_size

    @property
    def tokens(self) -> TokenBlock:
        """The tokens of this rank's queries."""
        return self.layout.tokens[self.rank]

    def local_parts(self) -> Iterator[KVPart]:
        """This rank's keys and values, a part per sequence that has any."""
        for sequence in range(self.table.batch):
            slots = self.table.slots(self.rank, sequence)
            if len(slots):
                keys, values = self.store.part(sequence)
                yield KVPart(sequence, keys, values, slots, self.table.positions(self.rank, sequence))

    def new_parts(self, start: int = 0, stop: int | None = None) -> Iterator[KVPart]:
        """Keys and values that this rank computed in rows ``[start, stop)`` of the pass, a part per sequence."""
        tokens = self.tokens
        for sequence in range(tokens.batch):
            run = tokens.run(sequence)
            rows = slice(max(run.start, start), run.stop if stop is None else min(run.stop, stop))
            if rows.start < rows.stop:
                keys, values = self.k_KLD[:, rows], self.v_KLD[:, rows]
                yield KVPart(sequence, keys, values, tokens.slot[rows], tokens.position[rows])

    def cached_counts(self) -> IntArray:
        """``[N, B]`` tokens that each rank held before the pass."""
        return self.table.counts() - np.array([np.diff(block.bounds) for block in self.layout.stored])

    def cached_parts(self) -> Iterator[KVPart]:
        """What this rank held before the pass, a part per sequence that has any."""
        counts = self.cached_counts()[self.rank].tolist()
        for part in self.local_parts():
            rows = slice(0, counts[part.sequence])
            if rows.stop:
                keys, values = part.k_KSD[:, rows], part.v_KSD[:, rows]
                yield KVPart(part.sequence, keys, values, part.slots[rows], part.positions[rows])


class AttentionMethod(Protocol):
    """A way to compute exact attention over tokens that are spread over ranks."""

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """``[H, L, Dv]`` float32 (or float64) outputs and the log-sum-exp ``[H, L]`` of this rank's queries."""


class PackedAttention:
    """Running partial attention of packed queries of several sequences.

    Parameters
    ----------
    q_HLD : Tensor
        ``[H, L, D]`` queries.
    tokens : TokenBlock
        Their tokens.
    scoring : Scoring
    value_dim : int
    """

    partial_type: type[PartialAttention] = PartialAttention
    """How one sequence's queries attend to a part."""

    def __init__(self, q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, value_dim: int):
        self._shape = (q_HLD.shape[0], q_HLD.shape[1], value_dim)
        self._dtype = torch.float64 if q_HLD.dtype == torch.float64 else torch.float32
        self._device = q_HLD.device
        self._runs: dict[int, tuple[slice, PartialAttention]] = {}
        for sequence in range(tokens.batch):
            run = tokens.run(sequence)
            if run.stop > run.start:
                partial = self.partial_type(q_HLD[:, run], tokens.slot[run], scoring, value_dim)
                self._runs[sequence] = (run, partial)

    def add(self, part: KVPart) -> None:
        """Attend to one part and merge."""
        if part.sequence in self._runs:
            _, partial = self._runs[part.sequence]
            partial.add(part.k_KSD, part.v_KSD, part.slots, part.positions)

    def result(self) -> tuple[Tensor, Tensor]:
        """``[H, L, Dv]`` outputs and ``[H, L]`` log-sum-exps so far."""
        if len(self._runs) == 1:
            run, partial = next(iter(self._runs.values()))
            if run.stop - run.start == self._shape[1]:
                return partial.out, partial.lse
        out = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        lse = torch.full(self._shape[:2], float("-inf"), dtype=self._dtype, device=self._device)
        for run, partial in self._runs.values():
            out[:, run] = partial.out
            lse[:, run] = partial.lse
        return out, lse
