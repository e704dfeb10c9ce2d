"""What a distributed attention method is given, and what it must return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

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
    """One layer's attention over all context-parallel ranks. The new keys and values are in the store already.

    Parameters
    ----------
    layer : int
        Index of the layer.
    q_HLD : Tensor
        ``[H, L, D]`` queries of this rank's tokens, packed.
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
                # The store may have the first rows attended to elsewhere.
                here = slice(len(slots) - keys.shape[1], None)
                yield KVPart(sequence, keys, values, slots[here], self.table.positions(self.rank, sequence)[here])


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

    def __init__(self, q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, value_dim: int):
        self._shape = (q_HLD.shape[0], q_HLD.shape[1], value_dim)
        self._dtype = torch.float64 if q_HLD.dtype == torch.float64 else torch.float32
        self._device = q_HLD.device
        self._runs: dict[int, tuple[slice, PartialAttention]] = {}
        for sequence in range(tokens.batch):
            run = tokens.run(sequence)
            if run.stop > run.start:
                partial = PartialAttention(q_HLD[:, run], tokens.slot[run], scoring, value_dim)
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
