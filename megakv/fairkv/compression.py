"""Compression of a layer's cache right after its attention to a prompt, before the next layer's cache is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.distributed.comm import Communicator
from megakv.distributed.sharding import IntArray
from megakv.errors import MegaKVError
from megakv.fairkv.budgets import is_compressed, tokens_per_head
from megakv.fairkv.config import FairKVConfig
from megakv.fairkv.method import EVERYTHING, Segment
from megakv.fairkv.observation import Observation, Queries, Turn, add_attention_mass, coarse_peaks, pooled_mass
from megakv.fairkv.replicas import HeadReplicas
from megakv.fairkv.selection import HEADS, SLOTS, AddUp, choose
from megakv.weights.placement.heads import HeadMap


class Compressor:
    """Compresses an engine's caches to per-head budgets; `replicas` share what a copied head keeps."""

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
        self.method = config.make_method(self._layers, head_map.n_kv_heads)
        if head_map.n_kv_heads > HEADS:
            raise ValueError(
                f"megakv.fairkv is not supported for {head_map.n_kv_heads} KV heads: no more than {HEADS} are"
            )

    def rows(self, lengths: IntArray) -> tuple[int, ...]:
        """The sequences that are compressed of those with ``[B]`` new tokens: each is judged by itself."""
        return tuple(np.flatnonzero(is_compressed(self._budget, self._min_tokens, lengths)).tolist())

    def check(self, turn: Turn) -> None:
        """A `MegaKVError` for a sequence that is too long to be ranked."""
        if turn.stop > SLOTS:
            raise MegaKVError(f"megakv.fairkv is not supported beyond {SLOTS} tokens; the sequence has {turn.stop}")

    def observe(self, call: AttentionCall, lse_HL: Tensor, turn: Turn) -> None:
        """Note what the queries of a pass, of a turn that goes on, look at. Every rank must call it.

        `lse_HL` is the log-sum-exp of the layer's attention, attention sinks included.
        """
        if self.method.observed == EVERYTHING:
            masses = self._observed(call, lse_HL, turn, range(call.table.batch))
            turn.seen[call.layer] = Observation(masses=masses)
        elif self.method.observed:
            # Keys that come later are not seen by them, but what they saw is compared with what later queries see.
            turn.seen[call.layer] = Observation(self._queries(call, lse_HL, turn))

    def compress(self, call: AttentionCall, lse_HL: Tensor, turn: Turn, rows: Sequence[int]) -> None:
        """Compress what a turn, which ends with this pass, added to some sequences of a layer's store.

        Every rank must call it. However tokens and heads are spread over ranks and passes, the same is kept.
        """
        segments = [self._segment(call, turn, sequence) for sequence in rows]
        budgets = [
            self.method.budgets(
                call.layer,
                self._layers,
                self._heads.n_kv_heads,
                tokens=self._tokens(segment),
                length=segment.length,
            )
            for segment in segments
        ]
        masses: Sequence[Tensor | None] = [None] * len(segments)
        if self.method.observed:
            masses = self._masses(call, list(self._observed(call, lse_HL, turn, rows).values()), segments)
            turn.seen.pop(call.layer, None)
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
            for sequence, mask in zip(rows, keep, strict=True):
                call.store.compress(sequence, mask)

    def _queries(self, call: AttentionCall, lse_HL: Tensor, turn: Turn) -> Queries:
        """Those that are observed: the window's, also where it began in an earlier pass, or all of the pass."""
        queries = Queries.of_pass(call, lse_HL, self.method.observed)
        before = turn.seen.get(call.layer)
        if before is None or before.queries is None:
            return queries
        return queries.after(before.queries, self.method.observed, call.rank)

    def _observed(self, call: AttentionCall, lse_HL: Tensor, turn: Turn, rows: Sequence[int]) -> dict[int, Tensor]:
        """By sequence, ``[K, n]`` what the observed queries up to this pass have given to each token of the turn."""
        queries, before = self._queries(call, lse_HL, turn), turn.seen.get(call.layer, Observation())
        segments, masses = [self._segment(call, turn, sequence) for sequence in rows], dict[int, Tensor]()
        for segment in segments:
            mass = segment.k_KSD.new_zeros(segment.k_KSD.shape[:2], dtype=queries.packed.dtype)
            if (earlier := before.masses.get(segment.sequence)) is not None:
                mass[:, : earlier.shape[1]] = earlier
            masses[segment.sequence] = mass
        # Every head looks at the next tokens; a question that comes later is far from what it asks for.
        near = 2 * self.method.pool_radius + 1 if self.method.peaks else 0
        add_attention_mass(call, queries, segments, list(masses.values()), self.method.peaks, near)
        return masses

    def _adder(self, over: Literal["cp", "world"], layer: int) -> AddUp:
        return lambda counts: self._comm.all_reduce(counts, over, operation="compression", layer=layer)

    def _segment(self, call: AttentionCall, turn: Turn, sequence: int) -> Segment:
        """A sequence's tokens of a turn, those of earlier passes included: they are dense, and the last ones."""
        held = [call.table.slots(rank, sequence) for rank in range(call.size)]
        starts = [int(np.searchsorted(slots, turn.first)) for slots in held]
        slots = [found[start:] for found, start in zip(held, starts, strict=True)]
        sorted_slots = np.sort(np.concatenate(slots))
        orders = tuple(np.searchsorted(sorted_slots, found) for found in slots)
        count = len(slots[call.rank])
        if count:
            keys, values = (part[:, part.shape[1] - count :] for part in call.store.part(sequence))
        else:
            keys = call.q_HLD.new_empty((call.kv_heads, 0, call.key_dim))
            values = call.q_HLD.new_empty((call.kv_heads, 0, call.value_dim))
        positions = call.table.positions(call.rank, sequence)[starts[call.rank] :]
        return Segment(sequence, keys, values, slots[call.rank], positions, orders, call.rank, sorted_slots)

    def _tokens(self, segment: Segment) -> int:
        return tokens_per_head(self._budget, segment.length, self.method.least)

    def _masses(self, call: AttentionCall, masses: list[Tensor], segments: Sequence[Segment]) -> list[Tensor]:
        """What was observed of whole segments, made ready to be compared."""
        if self._copied(call.layer):
            # Also where every replica has seen it all: they must agree to the last bit on what is kept.
            masses = [self._over_copies(call.layer, mass) for mass in masses]
        # What is kept anyway lends nothing to its neighbours.
        for segment, mass in zip(segments, masses, strict=True):
            mass[:, self._protected(segment)] = 0.0
        if self.method.peaks:
            masses = [coarse_peaks(mass) for mass in masses]
        if self.method.pool_radius:
            masses = pooled_mass(call, masses, segments, self.method.pool_radius)
        return masses

    def _protected(self, segment: Segment) -> Tensor:
        return segment.recent(self.method.protected(self._tokens(segment)))

    def _scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        return self.method.scores(segment, mass_KS).masked_fill(self._protected(segment), torch.inf)

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
        same = self._heads.whole_copies(layer)
        counted = set(self._counted(layer).tolist())
        everyone = mass_KS.new_zeros((len(copied), mass_KS.shape[1]))
        own = self._heads.shard(layer, self._comm.mesh.tp_rank).kv_heads
        for index, head in enumerate(own):
            # Replicas with the same query heads have seen the same: one of them speaks for all.
            if head in copied and (index in counted or head not in same):
                everyone[copied[head]] = mass_KS[index]
        how: Literal["sum", "max"] = "max" if self.method.peaks else "sum"
        everyone = self._comm.all_reduce(everyone, "tp", how, operation="compression", layer=layer)
        mass_KS = mass_KS.clone()
        for index, head in enumerate(own):
            if head in copied:
                mass_KS[index] = everyone[copied[head]]
        return mass_KS
