"""Compression that goes on while a model decodes: what a sequence's heads hold comes back within the budget, again and
again, by the attention that its tokens were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megakv.attention.method import AttentionCall
from megakv.base.device import upload
from megakv.cache.cache import ShardedCache
from megakv.cache.notes import Notes
from megakv.cache.ragged import Move, RaggedStore
from megakv.distributed.sharding import IntArray
from megakv.fairkv.compression import Compressor
from megakv.fairkv.compression_plan import ObservedPass
from megakv.fairkv.held import HeldTokens
from megakv.fairkv.method import EVERYTHING
from megakv.fairkv.observation import CHUNK_QUERIES, Observation, Queries, Turn, coarse_peaks
from megakv.fairkv.selection import choose

COUNTED = 32
"""Slots after which queries are counted in, where all of them are: one by one would take longer."""


class Eviction:
    """What an engine's compressor does beside prompts: it has an interval."""

    def __init__(self, compressor: Compressor):
        assert compressor.interval is not None
        self._compressor, self._method, self._comm = compressor, compressor.method, compressor.comm
        self._budget, self._interval = int(compressor.budget), compressor.interval

    # Of a pass, before its layers run

    def plan(
        self, cache: ShardedCache, lengths: IntArray, turn: Turn | None, compressed: Sequence[int]
    ) -> tuple[tuple[int, ...], bool]:
        """The sequences that are compressed again when a pass of ``[B]`` new tokens has attended, and whether its
        queries may matter; `compressed` are those of which it compresses a turn.

        What a head holds on average of what was compressed together is the budget, or all where that is less.
        """
        held = lengths.copy()
        if cache.length:
            held += cache.table.counts().sum(0)
            for sequence, ranges in enumerate(cache.compressed):
                for first, stop in ranges:
                    tokens = cache.table.since(first)[sequence] - cache.table.since(stop)[sequence]
                    held[sequence] -= max(0, tokens - self._budget)
        if turn is not None:
            of_turn = lengths + (cache.table.since(turn.first) if cache.length else 0)
            for sequence in compressed:
                held[sequence] -= max(0, of_turn[sequence] - self._budget)
        full, seen = self._budget + self._interval, self._method.observed
        watched = bool(seen == EVERYTHING or (seen and held.max(initial=0) > full - seen))
        evicted = held >= full
        if self._method.moved:
            # Gaps close as they come.
            evicted[list(compressed)] = True
        return tuple(np.flatnonzero(evicted).tolist()), watched

    # Of each layer, after its attention

    def follow(self, call: AttentionCall, lse_HL: Tensor, step: ObservedPass, given: Mapping[int, Notes]) -> None:
        """Note what a pass has looked at, and compress what is to be compressed again. Every rank must call it.

        `lse_HL` is the log-sum-exp of the layer's attention, attention sinks included; `given` what was noted of turns
        that the pass has compressed.
        """
        if step.compression.watched and self._method.observed == EVERYTHING:
            self._count_in(call, lse_HL, step, given)
        elif step.compression.watched:
            step.cache.note(call.layer, self._remembered(call, lse_HL, step, range(step.batch)))
        if step.compression.evict:
            self._evict(call, step)

    def _remembered(
        self, call: AttentionCall, lse_HL: Tensor, step: ObservedPass, rows: Sequence[int]
    ) -> dict[int, Notes]:
        """All notes, with the queries of a pass of some sequences; no more than are observed."""
        queries = Queries.of_pass(call, lse_HL, self._method.observed)
        own, notes = queries.tokens[call.rank], dict(step.cache.notes(call.layer))
        window = None if self._method.observed == EVERYTHING else self._method.observed
        for sequence in rows:
            run = own.run(sequence)
            if run.stop > run.start:
                notes[sequence] = notes.get(sequence, Notes()).joined(own.slot[run], queries.packed[run].clone())
            if sequence in notes and window is not None:
                slots = step.once(("last", sequence, window), partial(call.table.all_slots, sequence, window))
                notes[sequence] = notes[sequence].since(int(slots[0]) if len(slots) else 0)
        return notes

    @staticmethod
    def _all_slots(call: AttentionCall, step: ObservedPass, sequence: int) -> IntArray:
        return step.once(("slots", sequence), lambda: call.table.all_slots(sequence))

    def _count_in(self, call: AttentionCall, lse_HL: Tensor, step: ObservedPass, given: Mapping[int, Notes]) -> None:
        """Where all queries are observed: add what they give to the tokens that are held, many at a time."""
        turn, several = step.compression.turn, step.workload is not None and max(step.workload.new) > 1
        # Of a turn that is compressed, or may be, the compressor itself counts what its queries give to its own tokens.
        goes_on = turn is not None and step.slots < turn.stop
        before = (
            {row: turn.first for row in range(step.batch) if goes_on or row in step.compression.compress}
            if turn
            else {}
        )
        rows = [row for row in range(step.batch) if before.get(row) != 0]
        notes = self._remembered(call, lse_HL, step, rows) if rows else dict(step.cache.notes(call.layer))
        for row, known in given.items():
            assert known.mass is not None
            notes[row] = notes.get(row, Notes()).with_mass(known.heads, known.held, known.mass)
        if turn is not None and not goes_on:
            self._take_over(call, turn, notes, [row for row in rows if row not in step.compression.compress])
        if rows and (step.compression.evict or several or step.slots % COUNTED == 0):
            held = {row: HeldTokens.of(call, row, self._all_slots(call, step, row)) for row in rows}
            queries = {row: notes[row] for row in rows if row in notes}
            like = lse_HL.new_zeros(0)
            masses = {row: queries.get(row, Notes()).mass_of(tokens.slots, like) for row, tokens in held.items()}
            self._add(call, queries, held, masses, before)
            notes |= {row: tokens.noted(masses[row]) for row, tokens in held.items()}
        step.cache.note(call.layer, notes)

    @staticmethod
    def _take_over(call: AttentionCall, turn: Turn, notes: dict[int, Notes], rows: Sequence[int]) -> None:
        """What earlier pieces of a turn have given to its own tokens, which are not compressed after all."""
        for row in rows:
            mass = turn.seen.get(call.layer, Observation()).masses.get(row)
            if mass is None or not mass.numel():
                continue
            slots = call.table.slots(call.rank, row)
            slots = slots[np.searchsorted(slots, turn.first) :][: mass.shape[1]]
            heads = np.repeat(np.arange(len(mass)), len(slots))
            notes[row] = notes.get(row, Notes()).with_mass(heads, np.tile(slots, len(mass)), mass.reshape(-1))

    def _add(
        self,
        call: AttentionCall,
        notes: dict[int, Notes],
        held: dict[int, HeldTokens],
        masses: dict[int, Tensor],
        before: dict[int, int],
    ) -> None:
        """Count in what remembered queries, those of all context-parallel ranks, give to tokens of theirs."""
        peak = self._method.peaks
        near = 2 * self._method.pool_radius + 1 if peak else 0
        for sequence, slots, queries in self._gathered(call, notes):
            with call.comm.ledger.compute("compression", call.layer):
                for row in np.unique(sequence).tolist():
                    own = np.flatnonzero(sequence == row)
                    held[row].add_mass(
                        masses[row],
                        queries[upload(own, queries.device)],
                        slots[own],
                        call.scoring,
                        peak=peak,
                        near=near,
                        before=before.get(row),
                    )

    def _gathered(self, call: AttentionCall, notes: dict[int, Notes]) -> Iterator[tuple[IntArray, IntArray, Tensor]]:
        """Queries of some sequences, rank after rank and a part at a time: sequences, slots and queries."""
        kind = torch.promote_types(call.q_HLD.dtype, torch.float32)
        own = [(row, note) for row, note in notes.items() if note.queries is not None]
        packed = call.q_HLD.new_zeros((0, call.q_HLD.shape[0], call.q_HLD.shape[2] + 1), dtype=kind)
        packed = torch.cat([packed, *(note.queries for _, note in own if note.queries is not None)])
        names = [np.stack([np.full(len(note.slots), row), note.slots]) for row, note in own]
        names_2L = np.concatenate([np.zeros((2, 0), dtype=np.int64), *names], axis=1)
        if call.size == 1:
            yield names_2L[0], names_2L[1], packed
            return
        count = torch.tensor([len(packed)], device=packed.device)
        most = int(self._comm.all_reduce(count, "cp", "max", operation="compression", layer=call.layer))
        for start in range(0, most, CHUNK_QUERIES):
            rows = slice(start, min(start + CHUNK_QUERIES, most))
            lacking = rows.stop - rows.start - len(packed[rows])
            part = functional.pad(packed[rows], (0, 0, 0, 0, 0, lacking)).contiguous()
            # No sequence has the number -1.
            said = np.pad(names_2L[:, rows], ((0, 0), (0, lacking)), constant_values=-1)
            gather = partial(self._comm.all_gather, operation="compression", layer=call.layer)
            everyone, found = gather(upload(said, part.device)).cpu().numpy(), gather(part)
            for (sequence, slots), queries in zip(everyone, found, strict=True):
                real = int((sequence >= 0).sum())
                yield sequence[:real], slots[:real], queries[:real]

    def _evict(self, call: AttentionCall, step: ObservedPass) -> None:
        compressor, method, layer = self._compressor, self._method, call.layer
        own, counted, copied = compressor.own_heads(layer)
        # Of a head on several ranks each has all tokens, or each others.
        divided = bool(copied) and compressor.replicas is not None
        notes = dict(step.cache.notes(layer))
        held = {row: HeldTokens.of(call, row, self._all_slots(call, step, row)) for row in step.compression.evict}
        if copied and not divided:
            held = {row: self._as_wide(call, tokens) for row, tokens in held.items()}
        like = torch.zeros(0, dtype=torch.promote_types(call.q_HLD.dtype, torch.float32), device=call.q_HLD.device)
        masses = {row: notes.get(row, Notes()).mass_of(tokens.slots, like) for row, tokens in held.items()}
        given: dict[int, Tensor | None] = dict.fromkeys(held)
        if method.observed:
            if method.observed != EVERYTHING:
                self._add(call, {row: notes[row] for row in step.compression.evict if row in notes}, held, masses, {})
            given = {row: self._made_ready(call, tokens, masses[row], own, divided) for row, tokens in held.items()}
        segments = [tokens.segment() for tokens in held.values()]
        with call.comm.ledger.compute("compression", layer):
            scores = [compressor.scores(*pair) for pair in zip(segments, given.values(), strict=True)]
        window = call.scoring.window
        # No later query sees what lies before a window.
        first = 0 if window is None else step.slots - window + 1
        there = [tokens.from_slot(first) for tokens in held.values()]
        keep = choose(
            scores,
            [np.maximum(tokens.slots, 0) for tokens in held.values()],
            [compressor.budgets_of(layer, segment) for segment in segments],
            np.array(own),
            counted=np.arange(len(own)) if divided else np.array(counted, dtype=np.int64),
            over_tokens=partial(self._comm.all_reduce, over="cp", operation="compression", layer=layer),
            over_all=partial(self._comm.all_reduce, over="world", operation="compression", layer=layer),
            there=there,
            divided=divided,
        )
        for (row, tokens), kept in zip(held.items(), keep, strict=True):
            counts = kept.sum(1).cpu().numpy()
            rows = tokens.rows[kept.cpu().numpy()]
            move = None
            if method.moved:
                slot = int(tokens.all_slots[method.moved])
                before = int(np.searchsorted(call.table.slots(call.rank, row), slot))
                move = Move(len(tokens.all_slots) - self._budget, before, slot)
            cast(RaggedStore, call.store).replace(row, tokens.k_KMD[kept], tokens.v_KMD[kept], counts, rows, move)
            if method.observed == EVERYTHING:
                notes[row] = tokens.noted(masses[row], kept)
        step.cache.note(layer, notes)

    def _as_wide(self, call: AttentionCall, tokens: HeldTokens) -> HeldTokens:
        """With as much room as on all tensor-parallel ranks, which put together what they saw."""
        room = torch.tensor([tokens.rows.shape[1]], device=call.q_HLD.device)
        most = int(self._comm.all_reduce(room, "tp", "max", operation="compression", layer=call.layer))
        return HeldTokens.of(call, tokens.sequence, tokens.all_slots, most)

    def _made_ready(
        self, call: AttentionCall, tokens: HeldTokens, mass_KM: Tensor, own: Sequence[int], divided: bool
    ) -> Tensor:
        """What tokens were given, made ready to be compared, as that of a prompt's is."""
        compressor, method = self._compressor, self._method
        _, _, copied = compressor.own_heads(call.layer)
        mass = compressor.over_copies(call.layer, mass_KM) if copied and not divided else mass_KM.clone()
        mass[compressor.protected(tokens.segment())] = 0.0
        if method.peaks:
            mass = coarse_peaks(mass)
        if method.pool_radius:
            over: Literal["world", "cp"] = "world" if divided else "cp"
            heads, count = (np.array(own), compressor.kv_heads) if divided else (np.arange(len(own)), len(own))
            reduce = partial(self._comm.all_reduce, over=over, how="max", operation="compression", layer=call.layer)
            mass = tokens.pooled(mass, method.pool_radius, heads, count, reduce, mean=method.pools_mean)
        return mass
