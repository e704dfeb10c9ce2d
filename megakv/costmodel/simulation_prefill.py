"""Prefill as programs of the simulator: rings, gathers and the runahead chain (KV-Runahead, Section 4.1), on a
context-parallel x tensor-parallel mesh.

The programs are made of the same terms as the closed forms, `LayerTimes`, `Chain` and `TokenTimes`; what these add up,
the simulator lets happen.
"""

from __future__ import annotations

from collections.abc import Sequence

from megakv.attention.chain import HELD, OPERATION
from megakv.costmodel.attention_time import RINGS, LayerTimes, RankSteps
from megakv.costmodel.chain import ChainParts
from megakv.costmodel.context_parallel import rank_totals, sent_bytes
from megakv.costmodel.dense import SUMS, all_reduce_bytes
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.simulation_program import Program
from megakv.costmodel.timeline import LayerWork, in_step
from megakv.distributed.sharding import balanced_tokens
from megakv.runahead.partition import Partition, even

METHODS = ("pass_kv", "pass_q", "all_gather", "tsp", "tsp_causal", "runahead")


class PrefillProgram(PrefillTimes):
    """Programs of one pass over a prompt."""

    def build(self, method: str, partitions: Sequence[Partition] | None = None) -> Program:
        """The program of one of `METHODS`; a ValueError for a ring over fewer than 2N tokens."""
        building = _Building(self.workload.size, self._tp_size)
        if method == "runahead":
            self._add_chain(building, partitions or self.even())
        else:
            self._add_rings(building, method)
        ends = [index for each in building.last for index in each]
        end = self._tokens.end(len(self.workload.new), shared=self.workload.size > 1)
        for rank in building.places[-1]:
            building.program.compute("dense", rank, end, ends)
        return building.program

    def even(self) -> tuple[Partition, ...]:
        return tuple(even(tokens, self.workload.size) for tokens in self.workload.new)

    def tokens(self, method: str, partitions: Sequence[Partition] | None = None) -> list[int]:
        if method == "runahead":
            counts = rank_totals(partitions or self.even())
        elif method in ("tsp", "tsp_causal"):
            counts = rank_totals(self.even())
        else:
            counts = balanced_tokens(self.workload.new, self.workload.size)
        return [count for count in counts for _ in range(self._tp_size)]

    def _add_rings(self, building: _Building, method: str) -> None:
        workload, times, tokens = self.workload, self._tokens, self._most
        size, asked = workload.size, len(workload.new)
        new = balanced_tokens(workload.new, size)
        kept = [a + b for a, b in zip(new, balanced_tokens(workload.cached, size), strict=True)]
        rings = {kind: _Ring(layer, method, new, kept) for kind, layer in self._layers.items()}
        *others, _ = self._model.layers
        for layer, kind in enumerate(others):
            sums = times.sums(layer, tokens)
            before, after = times.before(layer, tokens), times.after(layer, tokens) - sums
            after += self._profile.idle_s(before + after + sums + rings[kind].busy_s)
            building.everywhere("dense", [before] * size, layer)
            for ranks in building.columns:
                rings[kind].add(building, ranks, layer)
            building.everywhere("dense", [after] * size, layer)
            self._add_sums(building, [sums] * size, [tokens] * size, layer)
        last = len(others)
        terms = self._attention(last, method).terms
        attention, together = terms.get("attention", 0.0), terms.get("collective", 0.0)
        way = sum(seconds for term, seconds in terms.items() if term != "attention")
        before, after = times.before(last, tokens, wanted=asked), times.after(last, tokens, wanted=asked)
        # Kernels are issued while those before them compute, but not past a collective, which all ranks wait in.
        after += self._profile.idle_s(before + attention + way - together + after)
        sent = self._last_bytes(method, new, kept, asking=0)
        self._add_last(building, [before] * size, [after] * size, [tokens] * size, (attention, way), sent)

    def _add_chain(self, building: _Building, partitions: Sequence[Partition]) -> None:
        parts = self._chain.parts(partitions, self.workload.cached)
        assert parts.visits is not None
        last = len(self._model.layers) - 1
        works = [work.first(last) for work in parts.works]
        if sum(self.workload.cached):
            works = in_step(works)
        new = rank_totals(partitions)
        # A rank without tokens computes one that stands in for them.
        rows = [max(1, count) for count in new]
        columns = [_Chain(building, ranks, parts, works) for ranks in building.columns]
        row_bytes = self._model.attention(tp_size=self._tp_size).kv_row_bytes
        for layer in range(last):
            sums = [self._tokens.sums(layer, tokens) for tokens in rows]
            for column in columns:
                column.add_layer(layer, row_bytes, sums)
            self._add_sums(building, sums, rows, layer)
        asking = max(place for place, count in enumerate(new) if count)
        sent = self._last_bytes(OPERATION, new, new, asking=asking)
        before = [float(work.before[-1]) for work in parts.works]
        after = [float(work.after[-1]) for work in parts.works]
        self._add_last(building, before, after, rows, parts.visits, sent)

    def _last_bytes(self, method: str, new: list[int], kept: list[int], *, asking: int) -> list[dict[str, int]]:
        """Per context-parallel rank, bytes by operation of a last layer that one token of each sequence asks."""
        wanted = [len(self.workload.new) * (place == asking) for place in range(len(new))]
        shape = self._layers[self._model.layers[-1]].shape
        return [sent_bytes(method, shape, new=new, kept=kept, rank=place, wanted=wanted) for place in range(len(new))]

    def _add_last(
        self,
        building: _Building,
        before_s: Sequence[float],
        after_s: Sequence[float],
        tokens: Sequence[int],
        visits: tuple[float, float],
        sent: Sequence[dict[str, int]],
    ) -> None:
        """A last layer of which one token of each sequence is wanted: its query goes round all ranks.

        `visits` are seconds of attention, and of all that is waited for; the others are per context-parallel rank.
        """
        layer, count = len(self._model.layers) - 1, len(self.workload.new)
        for ranks, seconds in zip(building.places, before_s, strict=True):
            for rank in ranks:
                building.compute("dense", rank, seconds, layer)
                building.compute("attention", rank, visits[0], layer)
        if len(building.places) > 1:
            for ranks in building.columns:
                nbytes = [sum(each.values()) for each in sent]
                building.meet(next(iter(sent[0])), ranks, visits[1], nbytes, layer)
        sums = [self._tokens.sums(layer, rows, wanted=count) for rows in tokens]
        building.everywhere("dense", [after - each for after, each in zip(after_s, sums, strict=True)], layer)
        self._add_sums(building, sums, [count] * len(sums), layer)

    def _add_sums(self, building: _Building, seconds: Sequence[float], tokens: Sequence[int], layer: int) -> None:
        """The all-reduces of a layer over tensor-parallel ranks, both at its end."""
        for ranks, each, count in zip(building.places, seconds, tokens, strict=True):
            if self._tp_size > 1 and each:
                hidden = count * self._model.hidden * self._model.element_bytes
                nbytes = [SUMS * all_reduce_bytes(hidden, self._tp_size)] * self._tp_size
                building.meet("all_reduce", ranks, each, nbytes, layer)


class _Building:
    """A program that grows: the next task of a rank waits for what it did last."""

    def __init__(self, size: int, tp_size: int):
        world = size * tp_size
        self.program = Program(world)
        self.last: list[list[int]] = [[] for _ in range(world)]
        self.places = [range(first, first + tp_size) for first in range(0, world, tp_size)]
        """Tensor-parallel ranks of every context-parallel one."""
        self.columns = [range(column, world, tp_size) for column in range(tp_size)]

    def compute(self, name: str, rank: int, seconds: float, layer: int) -> int:
        self.last[rank] = [self.program.compute(name, rank, seconds, self.last[rank], layer=layer)]
        return self.last[rank][0]

    def everywhere(self, name: str, seconds: Sequence[float], layer: int) -> None:
        """The next task of all ranks, as long as their context-parallel rank takes."""
        for ranks, each in zip(self.places, seconds, strict=True):
            for rank in ranks:
                self.compute(name, rank, each, layer)

    def meet(self, name: str, ranks: Sequence[int], seconds: float, nbytes: Sequence[int], layer: int) -> None:
        ready = [index for rank in ranks for index in self.last[rank]]
        parts = self.program.collective(name, ranks, seconds, ready, nbytes=nbytes, layer=layer)
        for rank, index in zip(ranks, parts, strict=True):
            self.last[rank] = [index]


class _Ring:
    """One kind of layer by a ring method; `new` and `kept` are tokens by context-parallel rank."""

    def __init__(self, times: LayerTimes, method: str, new: Sequence[int], kept: Sequence[int]):
        self._method = method
        self._size = len(new)
        self._ways: list[RankSteps] = [times.steps(method, place) for place in range(self._size)]
        predicted = times.predict(method)
        self.busy_s = predicted.seconds - predicted.terms.get("collective", 0.0)
        shape = times.shape
        row, shards = (shape.query_row_bytes, new) if method == "pass_q" else (shape.kv_row_bytes, kept)
        self._shard_bytes = [row * count for count in shards]
        self._return_bytes = [(sum(new) - count) * shape.partial_row_bytes for count in new]
        self._gathered_bytes = [
            sum(sent_bytes(method, shape, new=new, kept=kept, rank=place).values()) for place in range(self._size)
        ]

    def add(self, building: _Building, ranks: Sequence[int], layer: int) -> None:
        """A layer of one column of the mesh."""
        travelling, first = self._method in RINGS and self._size > 1, self._ways[0]
        for way, rank in zip(self._ways, ranks, strict=True):
            if way.pack_s:
                building.compute("dense", rank, way.pack_s, layer)
        if not travelling and self._size > 1:
            building.meet("all_gather", ranks, first.gather_s, self._gathered_bytes, layer)
        for step in range(self._size):
            if first.overhead_s:
                for rank in ranks:
                    building.compute("attention", rank, first.overhead_s, layer)
            arriving: list[list[int]] = [[] for _ in ranks]
            if travelling and step + 1 < self._size:
                arriving = self._pass_on(building, ranks, layer, step)
            for way, rank, messages in zip(self._ways, ranks, arriving, strict=True):
                done = building.compute("attention", rank, sum(way.steps[step]), layer)
                building.last[rank] = [done, *messages]
        if travelling and self._method == "pass_q":
            for way, rank in zip(self._ways, ranks, strict=True):
                building.compute("dense", rank, way.unpack_s, layer)
            seconds = max(way.return_s + way.straggle_s for way in self._ways)
            building.meet("pass_q_return", ranks, seconds, self._return_bytes, layer)
            for way, rank in zip(self._ways, ranks, strict=True):
                building.compute("attention", rank, way.combine_s, layer)

    def _pass_on(self, building: _Building, ranks: Sequence[int], layer: int, step: int) -> list[list[int]]:
        """Every rank sends the next one what it works on; both must be at this step: the receive is posted there."""
        arriving: list[list[int]] = [[] for _ in ranks]
        for place, rank in enumerate(ranks):
            behind = (place + 1) % self._size
            index = building.program.send(
                self._method,
                rank,
                ranks[behind],
                self._ways[place].transfer_s,
                [*building.last[rank], *building.last[ranks[behind]]],
                nbytes=self._shard_bytes[(place - step) % self._size],
                layer=layer,
            )
            arriving[place].append(index)
            arriving[behind].append(index)
        return arriving


class _Chain:
    """One column of the mesh, whose ranks are the links of a chain; the rules are those of `timeline.rank_events`."""

    def __init__(self, building: _Building, ranks: Sequence[int], parts: ChainParts, works: Sequence[LayerWork]):
        self._building = building
        self._program = building.program
        self._ranks = ranks
        self._parts = parts
        self._works = works
        # Per link, over all layers: messages that it receives, and its attention to them.
        self._messages: list[list[int]] = [[] for _ in ranks]
        self._attended: list[list[int]] = [[] for _ in ranks]

    def add_layer(self, layer: int, row_bytes: int, sums_s: Sequence[float]) -> None:
        """A layer of all links but its sums over tensor-parallel ranks, whose seconds are given."""
        for place, (rank, work) in enumerate(zip(self._ranks, self._works, strict=True)):
            projected = self._building.compute("dense", rank, float(work.before[layer]), layer)
            incoming = [sum(tokens) for _, tokens in self._parts.incoming[place]]
            own = [sum(tokens) for tokens in self._parts.messages[place]]
            sends = place < len(self._parts.links)
            for number, tokens in enumerate(own * sends):
                self._send(place, number, tokens * row_bytes, layer, (projected,))
            done = self._program.compute("attention", rank, float(work.local[layer]), (projected,), layer=layer)
            arriving = self._messages[place][layer * len(incoming) :]
            for chunk, tokens in enumerate(incoming):
                before = (done, arriving[chunk])
                if sends:
                    # What arrives is handed on when it is taken up.
                    self._send(place, len(own) + chunk, tokens * row_bytes, layer, before)
                done = self._program.compute("attention", rank, float(work.chunks[layer, chunk]), before, layer=layer)
                self._free(place, done)
            after = float(work.after[layer]) - sums_s[place]
            self._building.last[rank] = [self._program.compute("dense", rank, after, (done,), layer=layer)]

    def _send(self, place: int, number: int, nbytes: int, layer: int, after: tuple[int, ...]) -> None:
        messages, attended = self._messages[place + 1], self._attended[place + 1]
        waits = [*after, *messages[-1:]]
        freeing = len(messages) - HELD
        if 0 <= freeing < len(attended):
            waits.append(attended[freeing])
        seconds = float(self._parts.links[place][number])
        ends = self._ranks[place], self._ranks[place + 1]
        messages.append(self._program.send(OPERATION, *ends, seconds, waits, nbytes=nbytes, layer=layer))

    def _free(self, place: int, done: int) -> None:
        """A message was attended to: another one may come."""
        coming = len(self._attended[place]) + HELD
        self._attended[place].append(done)
        if coming < len(self._messages[place]):
            self._program.waits.append((self._messages[place][coming], done))
