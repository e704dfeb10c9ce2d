"""Prefill as a simulated run: rings, gathers and the runahead chain (KV-Runahead, Section 4.1), on a context-parallel x
tensor-parallel mesh.

Played are the terms that `PrefillTimes` adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megakv.attention.chain import HELD, OPERATION
from megakv.base.partition import Partition, even
from megakv.costmodel.attention_time import RINGS, LayerTimes, RankSteps
from megakv.costmodel.chain import ChainParts
from megakv.costmodel.context_parallel import rank_totals, sent_bytes
from megakv.costmodel.dense import SUMS, all_reduce_bytes
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.simulation import CALM, Disturbances, Simulation
from megakv.costmodel.timeline import ChainRank, LayerWork, Times, added, in_step, sharing
from megakv.distributed.layouts import balanced_tokens

METHODS = ("pass_kv", "pass_q", "all_gather", "tsp", "tsp_causal", "runahead")


class SimulatedPrefill(PrefillTimes):
    """Simulations of one pass over a prompt."""

    def play(
        self,
        method: str,
        partitions: Sequence[Partition] | None = None,
        disturbances: Disturbances = CALM,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> Simulation:
        """A pass by one of `METHODS`; a ValueError for a ring over fewer than 2N tokens."""
        played = Simulation(self.workload.size * self._tp_size, disturbances, progress=progress)
        if method == "runahead":
            self._play_chain(played, partitions or self.even())
        else:
            self._play_rings(played, method)
        end = self._tokens.end(len(self.workload.new), shared=self.workload.size > 1) + self._late_s
        last = played.seconds
        for rank in self._places[-1]:
            played.now[rank] = last
            played.compute("dense", rank, end)
        return played

    def even(self) -> tuple[Partition, ...]:
        return tuple(even(tokens, self.workload.size) for tokens in self.workload.new)

    def tokens(self, method: str, partitions: Sequence[Partition] | None = None) -> list[int]:
        """New tokens of every rank of the mesh."""
        if method == "runahead":
            counts = rank_totals(partitions or self.even())
        elif method in ("tsp", "tsp_causal"):
            counts = rank_totals(self.even())
        else:
            counts = balanced_tokens(self.workload.new, self.workload.size)
        return [count for count in counts for _ in range(self._tp_size)]

    @property
    def _places(self) -> list[range]:
        """Tensor-parallel ranks of every context-parallel one."""
        return [range(place * self._tp_size, (place + 1) * self._tp_size) for place in range(self.workload.size)]

    @property
    def _columns(self) -> list[range]:
        """Context-parallel ranks of every tensor-parallel one."""
        return [range(column, self.workload.size * self._tp_size, self._tp_size) for column in range(self._tp_size)]

    def _play_rings(self, played: Simulation, method: str) -> None:
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
            for rank in range(len(played.now)):
                played.compute("dense", rank, before, layer)
            for ranks in self._columns:
                rings[kind].play(played, ranks, layer)
            for ranks in self._places:
                self._end_layer(played, ranks, after, sums, tokens, layer)
        last = len(others)
        terms = self._attention(last, method).terms
        attention, together = terms.get("attention", 0.0), terms.get("collective", 0.0)
        way = sum(seconds for term, seconds in terms.items() if term != "attention")
        before, after = times.before(last, tokens, wanted=asked), times.after(last, tokens, wanted=asked)
        # Kernels are issued while those before them compute, but not past a collective, which all ranks wait in.
        after += self._profile.idle_s(before + attention + way - together + after)
        sent = self._last_bytes(method, new, kept, asking=0)
        self._play_last(played, [before] * size, [after] * size, [tokens] * size, (attention, way), sent)

    def _play_chain(self, played: Simulation, partitions: Sequence[Partition]) -> None:
        parts = self._chain.parts(partitions, self.workload.cached)
        assert parts.visits is not None
        new = rank_totals(partitions)
        # A rank without tokens computes one that stands in for them.
        rows = [max(1, count) for count in new]
        last = len(self._model.layers) - 1
        if last:
            self._play_links(played, parts, rows)
        asking = max(place for place, count in enumerate(new) if count)
        sent = self._last_bytes(OPERATION, new, new, asking=asking)
        before = [float(work.before[-1]) for work in parts.works]
        after = [float(work.after[-1]) for work in parts.works]
        self._play_last(played, before, after, rows, parts.visits, sent)

    def _play_links(self, played: Simulation, parts: ChainParts, rows: Sequence[int]) -> None:
        """All layers of a chain but the last, one context-parallel rank after the other."""
        layers = range(len(self._model.layers) - 1)
        row_bytes = self._model.attention(tp_size=self._tp_size).kv_row_bytes
        sums = [[self._tokens.sums(layer, tokens) for layer in layers] for tokens in rows]
        columns = [self._disturbed(played, parts, ranks, sums) for ranks in self._columns]
        handed: list[Times] = []
        for place, ranks in enumerate(self._places):
            coming = [sum(tokens) * row_bytes for _, tokens in parts.incoming[place]]
            chain = [
                ChainRank(
                    works[place]._replace(after=works[place].after - sums[place]),
                    handed[column] if coming else works[place].chunks,
                    links[place - 1] if coming else works[place].chunks,
                    held=HELD,
                )
                for column, (works, links) in enumerate(columns)
            ]
            for layer in layers:
                for rank, one in zip(ranks, chain, strict=True):
                    one.clock = played.now[rank]
                    one.layer()
                    _play_link(played, rank, rank - self._tp_size, one, coming, layer)
                self._play_sums(played, ranks, sums[place][layer], rows[place], layer)
            handed = [one.handing(len(parts.messages[place])) for one in chain]

    def _disturbed(
        self, played: Simulation, parts: ChainParts, ranks: Sequence[int], sums: Sequence[Sequence[float]]
    ) -> tuple[list[LayerWork], list[Times]]:
        """Work and messages of one column's ranks, as they are there and slow each other down."""
        layers = len(self._model.layers) - 1
        works = []
        for rank, work, own in zip(ranks, (each.first(layers) for each in parts.works), sums, strict=True):
            computed = work._replace(after=work.after - own)
            slower = LayerWork(*(played.computing(rank, each) for each in computed))
            works.append(slower._replace(after=slower.after + own))
        links = [
            played.sending(ranks[place], ranks[place + 1], link[None].repeat(layers, axis=0))
            for place, link in enumerate(parts.links)
        ]
        works, links = sharing(works, links, self._profile.exposed_transfer, self._profile.exposed_compute)
        return in_step(works) if sum(self.workload.cached) else works, links

    def _last_bytes(self, method: str, new: list[int], kept: list[int], *, asking: int) -> list[dict[str, int]]:
        """Per context-parallel rank, bytes by operation of a last layer that one token of each sequence asks."""
        wanted = [len(self.workload.new) * (place == asking) for place in range(len(new))]
        shape = self._layers[self._model.layers[-1]].shape
        return [sent_bytes(method, shape, new=new, kept=kept, rank=place, wanted=wanted) for place in range(len(new))]

    def _play_last(
        self,
        played: Simulation,
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
        for ranks, seconds in zip(self._places, before_s, strict=True):
            for rank in ranks:
                played.compute("dense", rank, seconds, layer)
                played.compute("attention", rank, visits[0], layer)
        if len(before_s) > 1:
            for ranks in self._columns:
                played.meet(next(iter(sent[0])), ranks, visits[1], [sum(each.values()) for each in sent], layer)
        for ranks, seconds, rows in zip(self._places, after_s, tokens, strict=True):
            sums = self._tokens.sums(layer, rows, wanted=count)
            self._end_layer(played, ranks, seconds - sums, sums, count, layer)

    def _end_layer(
        self, played: Simulation, ranks: range, seconds: float, sums_s: float, tokens: int, layer: int
    ) -> None:
        for rank in ranks:
            played.compute("dense", rank, seconds, layer)
        self._play_sums(played, ranks, sums_s, tokens, layer)

    def _play_sums(self, played: Simulation, ranks: range, seconds: float, tokens: int, layer: int) -> None:
        """The all-reduces of a layer over tensor-parallel ranks, both at its end."""
        if self._tp_size > 1 and seconds:
            nbytes = SUMS * all_reduce_bytes(tokens * self._model.hidden * self._model.element_bytes, self._tp_size)
            played.meet("all_reduce", ranks, seconds, [nbytes] * self._tp_size, layer)


def _play_link(played: Simulation, rank: int, sender: int, one: ChainRank, coming: Sequence[int], layer: int) -> None:
    """A layer of one rank of the chain, and what came to it."""
    work, transfers = one.work, one.transfers[layer]
    played.computed("dense", rank, float(work.before[layer]), layer)
    played.computed("attention", rank, float(work.local[layer]), layer)
    for chunk, nbytes in enumerate(coming):
        played.transfer(OPERATION, (sender, rank), one.arrivals[layer][chunk], transfers[chunk], nbytes, layer)
        played.wait(OPERATION, rank, one.pickups[layer][chunk], layer)
        played.computed("attention", rank, float(work.chunks[layer, chunk]), layer)
    played.computed("dense", rank, float(work.after[layer]), layer)


class _Ring:
    """One kind of layer by a ring method; `new` and `kept` are tokens by context-parallel rank."""

    def __init__(self, times: LayerTimes, method: str, new: Sequence[int], kept: Sequence[int]):
        self._profile = times.profile
        self._method = method
        self._size = len(new)
        self._ways: list[RankSteps] = [times.steps(method, place) for place in range(self._size)]
        predicted = times.predict(method)
        self.busy_s = predicted.seconds - predicted.terms.get("collective", 0.0)
        shape = times.shape
        row, shards = (shape.query_row_bytes, new) if method == "pass_q" else (shape.kv_row_bytes, kept)
        self._shard_bytes = [row * count for count in shards]
        self._sent = [sent_bytes(method, shape, new=new, kept=kept, rank=place) for place in range(self._size)]

    def play(self, played: Simulation, ranks: Sequence[int], layer: int) -> None:
        """A layer of one column of the mesh."""
        travelling, first = self._method in RINGS and self._size > 1, self._ways[0]
        for way, rank in zip(self._ways, ranks, strict=True):
            played.compute("dense", rank, way.pack_s, layer)
        if not travelling and self._size > 1:
            played.meet("all_gather", ranks, first.gather_s, [each["all_gather"] for each in self._sent], layer)
        for step in range(self._size):
            for rank in ranks:
                played.compute("attention", rank, first.overhead_s, layer)
            if travelling and step + 1 < self._size:
                self._pass_on(played, ranks, layer, step)
            else:
                for way, rank in zip(self._ways, ranks, strict=True):
                    played.compute("attention", rank, sum(way.steps[step]), layer)
        if travelling and self._method == "pass_q":
            for way, rank in zip(self._ways, ranks, strict=True):
                played.compute("dense", rank, way.unpack_s, layer)
            seconds = max(way.return_s + way.straggle_s for way in self._ways)
            played.meet("pass_q_return", ranks, seconds, [each["pass_q_return"] for each in self._sent], layer)
            for way, rank in zip(self._ways, ranks, strict=True):
                played.compute("attention", rank, way.combine_s, layer)

    def _pass_on(self, played: Simulation, ranks: Sequence[int], layer: int, step: int) -> None:
        """Every rank attends to a shard and sends it to the next one, which posts its receive at this step."""
        late, busy = self._profile.exposed_transfer, self._profile.exposed_compute
        pairs = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        computed = [played.computing(rank, sum(way.steps[step])) for way, rank in zip(self._ways, ranks, strict=True)]
        sent = [played.sending(*pair, way.transfer_s) for way, pair in zip(self._ways, pairs, strict=True)]
        ends = []
        for place, (seconds, pair) in enumerate(zip(sent, pairs, strict=True)):
            # Both slow each other down; a transfer concerns two processors, a processor two transfers.
            beside = (computed[place] + computed[(place + 1) % self._size]) / 2
            seconds *= 1 + added(busy, beside, seconds, late)
            ends.append(max(played.now[rank] for rank in pair) + seconds)
            nbytes = self._shard_bytes[(place - step) % self._size]
            played.transfer(self._method, pair, ends[-1], seconds, nbytes, layer)
        for place, (seconds, rank) in enumerate(zip(computed, ranks, strict=True)):
            seconds *= 1 + added(late, (sent[place] + sent[place - 1]) / 2, seconds, busy)
            played.computed("attention", rank, seconds, layer)
        for end, pair in zip(ends, pairs, strict=True):
            for rank in pair:
                played.wait(self._method, rank, end, layer)
