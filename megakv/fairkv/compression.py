"""Compression of a layer's cache right after its attention to a prompt, before the next layer's cache is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.base.errors import CombinationError, MegaKVError
from megakv.cache.notes import Notes
from megakv.cache.ragged import RaggedStore
from megakv.distributed.comm import Communicator
from megakv.distributed.sharding import IntArray
from megakv.fairkv.budgets import HeadBudgets, is_compressed, tokens_per_head
from megakv.fairkv.config import FairKVConfig
from megakv.fairkv.method import EVERYTHING, Segment
from megakv.fairkv.observation import Observation, Queries, Turn, add_attention_mass, coarse_peaks, pooled_mass
from megakv.fairkv.selection import HEADS, SLOTS, choose
from megakv.weights.placement.heads import HeadMap

if TYPE_CHECKING:
    from megakv.fairkv.replicas import HeadReplicas


class Compressor:
    """Compresses an engine's caches to per-head budgets; `replicas` share what a copied head keeps."""

    def __init__(
        self, config: FairKVConfig, head_map: HeadMap, comm: Communicator, replicas: HeadReplicas | None = None
    ):
        assert config.budget is not None
        self.budget = config.budget
        self.interval = config.decode_interval
        self._min_tokens = config.min_tokens
        self._heads = head_map
        self.comm = comm
        self.replicas = replicas
        self._layers = len(head_map.layers)
        self.kv_heads = head_map.n_kv_heads
        self.method = config.make_method(self._layers, head_map.n_kv_heads)
        if head_map.n_kv_heads > HEADS:
            raise CombinationError(
                "room", f"megakv.fairkv is not supported for {head_map.n_kv_heads} KV heads: no more than {HEADS} are"
            )

    @property
    def moves(self) -> bool:
        """Whether tokens come to count by their place in the cache."""
        return self.interval is not None and self.method.moved > 0

    @property
    def most(self) -> int | None:
        """Tokens of a sequence that a head holds at most, on average, while decoding; None where there is no bound."""
        return None if self.interval is None else int(self.budget) + self.interval

    def rows(self, lengths: IntArray) -> tuple[int, ...]:
        """The sequences that are compressed of those with ``[B]`` new tokens: each is judged by itself."""
        return tuple(np.flatnonzero(is_compressed(self.budget, self._min_tokens, lengths)).tolist())

    def kept(self, length: int) -> int | None:
        """Tokens that a head keeps on average of a turn of so many; None where it is not compressed."""
        return self._tokens(length) if self.rows(np.array([length])) else None

    def check(self, turn: Turn) -> None:
        """A `MegaKVError` for a sequence that is too long to be ranked."""
        if turn.stop > SLOTS:
            raise MegaKVError(f"megakv.fairkv is not supported beyond {SLOTS} tokens; the sequence has {turn.stop}")

    def observe(self, call: AttentionCall, lse_HL: Tensor, turn: Turn) -> None:
        """Note what the queries of a pass, of a turn that goes on, look at. Every rank must call it.

        `lse_HL` is the log-sum-exp of the layer's attention, attention sinks included.
        """
        if self.method.observed == EVERYTHING:
            segments = [self._segment(call, turn, sequence) for sequence in range(call.table.batch)]
            masses = self._observed(call, lse_HL, turn, segments)
            turn.seen[call.layer] = Observation(masses=dict(enumerate(masses)))
        elif self.method.observed:
            # Keys that come later are not seen by them, but what they saw is compared with what later queries see.
            turn.seen[call.layer] = Observation(self._queries(call, lse_HL, turn))

    def compress(self, call: AttentionCall, lse_HL: Tensor, turn: Turn, rows: Sequence[int]) -> dict[int, Notes]:
        """Compress what a turn, which ends with this pass, added to some sequences of a layer's store.

        Every rank must call it. However tokens and heads are spread over ranks and passes, the same is kept. Returned
        is, where it will matter, what that was given: by sequence.
        """
        segments = [self._segment(call, turn, sequence) for sequence in rows]
        masses: Sequence[Tensor | None] = [None] * len(segments)
        given: list[Tensor] = []
        if self.method.observed:
            observed = self._observed(call, lse_HL, turn, segments)
            if self.interval is not None and self.method.observed == EVERYTHING:
                given = [mass.clone() for mass in observed]
            masses = self._masses(call, observed, segments)
            # Of the sequences that are kept whole it is known what they were given.
            others = turn.seen.pop(call.layer, Observation()).masses
            turn.seen[call.layer] = Observation(masses={row: mass for row, mass in others.items() if row not in rows})
        own, counted, _ = self.own_heads(call.layer)
        with call.comm.ledger.compute("compression", call.layer):
            scores = [self.scores(*pair) for pair in zip(segments, masses, strict=True)]
        keep = choose(
            scores,
            [segment.slots for segment in segments],
            [self.budgets_of(call.layer, segment) for segment in segments],
            np.array(own),
            counted=np.array(counted, dtype=np.int64),
            over_tokens=partial(self.comm.all_reduce, over="cp", operation="compression", layer=call.layer),
            over_all=partial(self.comm.all_reduce, over="world", operation="compression", layer=call.layer),
        )
        if self.replicas is not None:
            keep = self.replicas.split(call.layer, keep, call.table.prompts[list(rows)])
        slots = [segment.slots for segment in segments]
        del segments, masses, scores
        with call.comm.ledger.compute("compression", call.layer):
            for sequence, mask in zip(rows, keep, strict=True):
                cast(RaggedStore, call.store).compress(sequence, mask)
        if not given:
            return {}
        notes = {}
        for sequence, mask, mass, column in zip(rows, keep, given, slots, strict=True):
            heads, places = np.nonzero(mask.cpu().numpy())
            notes[sequence] = Notes().with_mass(heads, column[places], mass[mask])
        return notes

    def budgets_of(self, layer: int, segment: Segment) -> HeadBudgets:
        """Those of a layer's heads for what of a segment is kept."""
        tokens = self._tokens(segment.length)
        return self.method.budgets(layer, self._layers, self.kv_heads, tokens=tokens, length=segment.length)

    def _queries(self, call: AttentionCall, lse_HL: Tensor, turn: Turn) -> Queries:
        """Those that are observed: the window's, also where it began in an earlier pass, or all of the pass."""
        queries = Queries.of_pass(call, lse_HL, self.method.observed)
        before = turn.seen.get(call.layer)
        if before is None or before.queries is None:
            return queries
        return queries.after(before.queries, self.method.observed, call.rank)

    def _observed(self, call: AttentionCall, lse_HL: Tensor, turn: Turn, segments: Sequence[Segment]) -> list[Tensor]:
        """``[K, n]`` what the observed queries up to this pass have given to each token of the turn."""
        queries, before = self._queries(call, lse_HL, turn), turn.seen.get(call.layer, Observation())
        masses = []
        for segment in segments:
            mass = segment.k_KSD.new_zeros(segment.k_KSD.shape[:2], dtype=queries.packed.dtype)
            if (earlier := before.masses.get(segment.sequence)) is not None:
                mass[:, : earlier.shape[1]] = earlier
            masses.append(mass)
        # Every head looks at the next tokens; a question that comes later is far from what it asks for.
        near = 2 * self.method.pool_radius + 1 if self.method.peaks else 0
        add_attention_mass(call, queries, segments, masses, self.method.peaks, near)
        return masses

    def _segment(self, call: AttentionCall, turn: Turn, sequence: int) -> Segment:
        """A sequence's tokens of a turn, those of earlier passes included: they are dense, and the last ones."""
        held = [call.table.slots(rank, sequence) for rank in range(call.size)]
        starts = [int(np.searchsorted(slots, turn.first)) for slots in held]
        slots = [found[start:] for found, start in zip(held, starts, strict=True)]
        sorted_slots = np.sort(np.concatenate(slots))
        orders = tuple(np.searchsorted(sorted_slots, found) for found in slots)
        count = len(slots[call.rank])
        if count:
            turn_rows = cast(RaggedStore, call.store).part(sequence)
            keys, values = (part[:, part.shape[1] - count :] for part in turn_rows)
        else:
            keys = call.q_HLD.new_empty((call.kv_heads, 0, call.key_dim))
            values = call.v_KLD[:, :0]
        positions = call.table.positions(call.rank, sequence)[starts[call.rank] :]
        return Segment(sequence, keys, values, slots[call.rank], positions, orders, call.rank, sorted_slots)

    def _tokens(self, length: int) -> int:
        return tokens_per_head(self.budget, length, self.method.least)

    def _masses(self, call: AttentionCall, masses: list[Tensor], segments: Sequence[Segment]) -> list[Tensor]:
        """What was observed of whole segments, made ready to be compared."""
        if self.own_heads(call.layer)[2]:
            # Also where every replica has seen it all: they must agree to the last bit on what is kept.
            masses = [self.over_copies(call.layer, mass) for mass in masses]
        # What is kept anyway lends nothing to its neighbours.
        for segment, mass in zip(segments, masses, strict=True):
            mass[:, self.protected(segment)] = 0.0
        if self.method.peaks:
            masses = [coarse_peaks(mass) for mass in masses]
        if self.method.pool_radius:
            masses = pooled_mass(call, masses, segments, self.method.pool_radius, mean=self.method.pools_mean)
        return masses

    def protected(self, segment: Segment) -> Tensor:
        """The most recent tokens, which are kept anyway."""
        return segment.recent(self.method.protected(self._tokens(segment.length)))

    def scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        """``[K, n]`` by which a segment's tokens are chosen."""
        return self.method.scores(segment, mass_KS).masked_fill(self.protected(segment), torch.inf)

    def own_heads(self, layer: int) -> tuple[list[int], list[int], list[int]]:
        """This rank's KV heads; local indices of those that no earlier rank holds; and the heads, of the whole layer,
        that several ranks hold.
        """
        rank, shards = self.comm.mesh.tp_rank, self._heads.layers[layer]
        own = list(shards[rank].kv_heads)
        earlier = {head for shard in shards[:rank] for head in shard.kv_heads}
        held = Counter(head for shard in shards for head in shard.kv_heads)
        counted = [index for index, head in enumerate(own) if head not in earlier]
        return own, counted, sorted(head for head, number in held.items() if number > 1)

    def over_copies(self, layer: int, mass_KS: Tensor) -> Tensor:
        """Put together what the query heads of a KV head saw on all the ranks that hold it."""
        own, counted, copied = self.own_heads(layer)
        same = self._heads.whole_copies(layer)
        here = [(index, copied.index(head)) for index, head in enumerate(own) if head in copied]
        everyone = mass_KS.new_zeros((len(copied), mass_KS.shape[1]))
        for index, place in here:
            # Replicas with the same query heads have seen the same: one of them speaks for all.
            if index in counted or own[index] not in same:
                everyone[place] = mass_KS[index]
        how: Literal["sum", "max"] = "max" if self.method.peaks else "sum"
        everyone = self.comm.all_reduce(everyone, "tp", how, operation="compression", layer=layer)
        mass_KS = mass_KS.clone()
        for index, place in here:
            mass_KS[index] = everyone[place]
        return mass_KS
