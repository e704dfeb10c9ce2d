"""What a distributed attention method is given, and what it must return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megakv.attention.part import KVPart, Part
from megakv.attention.partial import PartialAttention, Scoring
from megakv.cache import TokenTable
from megakv.comm import Communicator
from megakv.sharding import Layout, TokenBlock
from megakv.stores import KVStore


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

    def local_parts(self) -> Iterator[Part]:
        """This rank's keys and values of all sequences that have any."""
        for sequence in range(self.table.batch):
            slots = self.table.slots(self.rank, sequence)
            if len(slots):
                yield from self.store.parts(sequence, slots, self.table.positions(self.rank, sequence))

    def dense_parts(self) -> list[KVPart]:
        """The same for methods that send keys and values to other ranks, which only dense ones are made for."""
        parts = []
        for part in self.local_parts():
            assert isinstance(part, KVPart), "compressed keys and values do not travel"
            parts.append(part)
        return parts


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

    def add(self, part: Part) -> None:
        """Attend to one part and merge."""
        if part.sequence in self._runs:
            part.add_to(self._runs[part.sequence][1])

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
