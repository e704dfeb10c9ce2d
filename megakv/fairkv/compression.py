"""Compression of a layer's cache right after its attention to a prompt, before the next layer's cache is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.comm import Communicator
from megakv.errors import MegaKVError
from megakv.fairkv.budgets import HeadBudgets, tokens_per_head
from megakv.fairkv.config import FairKVConfig
from megakv.fairkv.methods import make_method
from megakv.fairkv.observation import attention_mass, coarse_peaks, pooled_mass
from megakv.fairkv.replicas import HeadReplicas
from megakv.fairkv.scoring import Segment, check_budget
from megakv.fairkv.selection import HEADS, SLOTS, AddUp, choose
from megakv.fairkv.store import RaggedStore
from megakv.placement.heads import HeadMap
from megakv.sharding import IntArray


class Compressor:
    """Compresses an engine's caches to per-head budgets.

    Parameters
    ----------
    config : FairKVConfig
    head_map : HeadMap
        Which heads are on which tensor-parallel rank.
    comm : Communicator
    replicas : HeadReplicas, optional
        The ranks of copied heads, which share what such a head keeps.

    Raises
    ------
    ValueError
        If a setting does not fit the method or the model.
    """

    def __init__(
        self, config: FairKVConfig, head_map: HeadMap, comm: Communicator, replicas: HeadReplicas | None = None
    ):
        assert config.budget is not None
        self._budget = config.budget
        self._min_tokens = config.min_tokens
        self._heads = head_map
        self._comm = comm
        self._replicas = replicas
        self._layers = len(head_map.layers)
        self.method = make_method(config, self._layers, head_map.n_kv_heads)
        if head_map.n_kv_heads > HEADS:
            raise ValueError(
                f"megakv.fairkv is not supported for {head_map.n_kv_heads} KV heads: no more than {HEADS} are"
            )

    def wanted(self, new: IntArray, slots: int, *, first: bool) -> bool:
        """Whether a pass is to be compressed.

        Parameters
        ----------
        new : IntArray
            ``[B]`` new tokens of every sequence.
        slots : int
            Slots of the sequence after the pass.
        first : bool
            Whether the cache was empty.

        Raises
        ------
        ValueError
            If the budget is above the length of the longest prompt, or the sequence too long to be ranked.
        """
        longest = int(new.max(initial=0))
        if first:
            check_budget(self._budget, longest)
        if slots > SLOTS:
            raise MegaKVError(f"megakv.fairkv is not supported beyond {SLOTS} tokens; the sequence has {slots}")
        return longest >= max(self._min_tokens, 2 * self._comm.mesh.cp_size)

    def compress(self, call: AttentionCall, lse_HL: Tensor) -> None:
        """Compress what a pass added to a layer's store.

        Every rank must call it. The kept set is the same however tokens and heads are spread over ranks.

        Parameters
        ----------
        call : AttentionCall
            The layer's attention, just computed.
        lse_HL : Tensor
            ``[H, L]`` its log-sum-exp, attention sinks included.
        """
        store = call.store
        assert isinstance(store, RaggedStore)
        segments = [self._segment(call, store, sequence) for sequence in range(call.table.batch)]
        budgets = [self._budgets(call.layer, segment.length) for segment in segments]
        masses = self._masses(call, lse_HL, segments)
        shard = self._heads.shard(call.layer, self._comm.mesh.tp_rank)
        with call.comm.ledger.compute("compression", call.layer):
            scores = [self._scores(*pair) for pair in zip(segments, masses, strict=True)]
        keep = choose(
            scores,
            [segment.slots for segment in segments],
            budgets,
            np.array(shard.kv_heads),
            counted=self._counted(call.layer),
            over_tokens=self._adder("cp", call.layer),
            over_all=self._adder("world", call.layer),
        )
        if self._replicas is not None:
            keep = self._replicas.split(call.layer, keep)
        del segments, masses, scores
        with call.comm.ledger.compute("compression", call.layer):
            for sequence, mask in enumerate(keep):
                store.compress(sequence, mask)

    def _adder(self, over: Literal["cp", "world"], layer: int) -> AddUp:
        return lambda counts: self._comm.add_counts(counts, over, operation="compression", layer=layer)

    def _segment(self, call: AttentionCall, store: RaggedStore, sequence: int) -> Segment:
        blocks = call.layout.stored
        slots = [block.slot[block.run(sequence)] for block in blocks]
        sorted_slots = np.sort(np.concatenate(slots))
        orders = tuple(np.searchsorted(sorted_slots, held) for held in slots)
        own, count = blocks[call.rank], len(slots[call.rank])
        if count:
            keys, values = (part[:, part.shape[1] - count :] for part in store.part(sequence))
        else:
            keys = call.q_HLD.new_empty((call.kv_heads, 0, call.key_dim))
            values = call.q_HLD.new_empty((call.kv_heads, 0, call.value_dim))
        positions = own.position[own.run(sequence)]
        return Segment(sequence, keys, values, slots[call.rank], positions, orders, call.rank)

    def _budgets(self, layer: int, length: int) -> HeadBudgets:
        tokens = tokens_per_head(self._budget, length, self.method.least)
        return self.method.budgets(layer, self._layers, self._heads.n_kv_heads, tokens=tokens, length=length)

    def _masses(self, call: AttentionCall, lse_HL: Tensor, segments: Sequence[Segment]) -> list[Tensor | None]:
        if not self.method.observed:
            return [None] * len(segments)
        # Every head looks at the next tokens; a question that comes later is far from what it asks for.
        near = 2 * self.method.pool_radius + 1 if self.method.reduce == "peak" else 0
        masses = attention_mass(call, lse_HL, segments, self.method.observed, self.method.reduce, near)
        if self._copied(call.layer):
            # Also where every replica has seen it all: they must agree to the last bit on what is kept.
            masses = [self._over_copies(call.layer, mass) for mass in masses]
        # What is kept anyway lends nothing to its neighbours.
        for segment, mass in zip(segments, masses, strict=True):
            mass[:, segment.recent(self._protected(segment))] = 0.0
        if self.method.reduce == "peak":
            masses = [coarse_peaks(mass) for mass in masses]
        if self.method.pool_radius:
            masses = pooled_mass(call, masses, segments, self.method.pool_radius)
        return list(masses)

    def _protected(self, segment: Segment) -> int:
        tokens = tokens_per_head(self._budget, segment.length, self.method.least)
        return self.method.protected(tokens)

    def _scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        scores = self.method.scores(segment, mass_KS)
        return scores.masked_fill(segment.recent(self._protected(segment)), torch.inf)

    def _counted(self, layer: int) -> IntArray:
        """Local indices of the KV heads that no earlier rank holds."""
        rank = self._comm.mesh.tp_rank
        earlier = {head for other in range(rank) for head in self._heads.shard(layer, other).kv_heads}
        own = self._heads.shard(layer, rank).kv_heads
        return np.array([index for index, head in enumerate(own) if head not in earlier], dtype=np.int64)

    def _copied(self, layer: int) -> list[int]:
        """KV heads that several ranks hold, ascending."""
        held = [head for shard in self._heads.layers[layer] for head in shard.kv_heads]
        return [head for head in range(self._heads.n_kv_heads) if held.count(head) > 1]

    def _over_copies(self, layer: int, mass_KS: Tensor) -> Tensor:
        """Put together what the query heads of a KV head saw on all the ranks that hold it."""
        copied = {head: place for place, head in enumerate(self._copied(layer))}
        same = self._heads.replicas(layer)
        counted = set(self._counted(layer).tolist())
        everyone = mass_KS.new_zeros((len(copied), mass_KS.shape[1]))
        own = self._heads.shard(layer, self._comm.mesh.tp_rank).kv_heads
        for index, head in enumerate(own):
            # Replicas with the same query heads have seen the same: one of them speaks for all.
            if head in copied and (index in counted or head not in same):
                everyone[copied[head]] = mass_KS[index]
        how: Literal["sum", "max"] = "sum" if self.method.reduce == "mean" else "max"
        everyone = self._comm.tp_combine(everyone, how, operation="compression", layer=layer)
        mass_KS = mass_KS.clone()
        for index, head in enumerate(own):
            if head in copied:
                mass_KS[index] = everyone[copied[head]]
        return mass_KS
