"""Predicted timeline of the runahead chain (KV-Runahead, Section 4.1): what every rank of it does in every layer.

In a layer, rank r projects its own tokens and hands their keys and values to rank r+1, attends to itself while the
prefix is in flight, then takes the prefix as it arrives, nearest rank first, in chunks: each is handed on and attended
to. The link to the next rank carries its messages one after another. Rank r needs nothing of later ranks, so the chain
is worked out rank by rank, all layers of one at once (`megakv.costmodel.timeline`). A simulated run is the same with
events kept, and with ranks and links as slow as they are said to be.

Of the last layer one token of each sequence is wanted. Unless the last rank keeps all keys and values, nothing goes
down the chain in it: those queries go round all ranks, which meet there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megakv.attention.chain import HELD, OPERATION
from megakv.attention.runahead import CHUNK_TOKENS
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload, rank_totals
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.kernels import Kernels
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.simulated_layers import MeshLayers, last_bytes
from megakv.costmodel.simulation import Simulation
from megakv.costmodel.timeline import ChainRank, LayerWork, Times, in_step, sharing
from megakv.distributed.sharding import pieces

Message = tuple[int, tuple[int, ...]]
"""Who computed it, and its tokens of each sequence."""


@dataclass(frozen=True)
class ChainPrediction:
    """When the ranks of a chain end their layers."""

    seconds: float  # TTFT: the last rank's last layer, and the logits.
    ends_s: Times  # ``[N, layers]`` when each rank has computed each layer.
    waited_s: Times  # ``[N, layers]`` how long it waited for the prefix in it.

    @property
    def busy_s(self) -> list[float]:
        """``[N]`` how long each rank works, all layers together."""
        busy: list[float] = (self.ends_s[:, -1] - self.waited_s.sum(axis=1)).tolist()
        return busy


@dataclass(frozen=True)
class ChainParts:
    """What the ranks and links of a chain have to do, each as if nothing else ran."""

    # Per rank, tokens of each sequence in the messages that carry its own keys and values.
    messages: list[list[tuple[int, ...]]]
    incoming: list[list[Message]]  # Per rank, the messages that it receives in a layer, in order.
    works: list[LayerWork]  # Per rank.
    # Per rank that sends, seconds of the messages it sends in a layer: its own, then those it received.
    links: list[Times]
    # Per rank, the tokens that it computes, and seconds of each layer's sums over tensor-parallel ranks, which its work
    # has, too.
    rows: list[int]
    sums: list[Times]
    # Seconds of the last layer's wanted queries: attention to them on every rank, and their way round. None where the
    # last layer is like all others, because the last rank collects its keys and values.
    visits: tuple[float, float] | None = None


class Chain:
    """Predictions for all partitions of one model on one machine; `kv` and `chunk_tokens` as in ``megakv.runahead``."""

    def __init__(
        self,
        profile: HardwareProfile,
        model: ModelShape,
        *,
        tp_size: int = 1,
        kv: str = "sharded",
        chunk_tokens: int = CHUNK_TOKENS,
    ):
        self._profile = profile
        self._gathered = kv == "last"
        self._chunk_tokens = chunk_tokens
        self._step_s = profile.step_overhead_s.get("pass_kv", 0.0)
        self._tokens = TokenTimes(profile, model, tp_size=tp_size)
        self._mesh = MeshLayers(model, self._tokens, tp_size=tp_size)
        self._shapes = {index: model.attention(tp_size=tp_size, layer=index) for index, _ in model.layer_kinds}
        self._kernels = {index: Kernels(profile, shape) for index, shape in self._shapes.items()}
        # The kind of every layer, as its place among the kinds.
        firsts = list(self._shapes)
        self._kinds = np.array([firsts.index(model.layers.index(layer)) for layer in model.layers])
        self._last_shape = self._shapes[firsts[self._kinds[-1]]]
        self._row_bytes = self._shapes[0].kv_row_bytes
        self._visits_s: dict[Workload, float] = {}

    def predict(
        self, partitions: Sequence[Sequence[int]], cached: Sequence[int], run: Simulation | None = None
    ) -> ChainPrediction:
        """The timeline of one prompt: tokens of every rank, and those cached evenly, per sequence of the batch.

        run: the clocks of a whole mesh, which keep what happens. None: one rank stands for its tensor-parallel ones.
        """
        parts, sequences = self.parts(partitions, cached), len(partitions)
        size, new = len(parts.works), rank_totals(partitions)
        run = Simulation(size, records=False) if run is None else run
        ends, waited = self._chained(parts, sum(cached), run)
        if parts.visits is not None:
            before, after = ([float(getattr(work, name)[-1]) for work in parts.works] for name in ("before", "after"))
            asking = max(rank for rank, count in enumerate(new) if count)
            sent = last_bytes(OPERATION, self._last_shape, new, new, sequences=sequences, asking=asking)
            ready = self._mesh.last(run, before, after, parts.rows, parts.visits, sent, sequences=sequences)
            ends = np.column_stack([ends, run.now[:: len(run.places[0])]])
            waited = np.column_stack([waited, max(ready) - np.array(ready)])
        end = self._tokens.end(sequences, shared=size > 1)
        return ChainPrediction(float(ends[:, -1].max()) + end, ends, waited)

    def parts(self, partitions: Sequence[Sequence[int]], cached: Sequence[int]) -> ChainParts:
        counts = np.asarray(partitions, dtype=np.int64)
        ranks = counts.shape[1]
        totals = counts.sum(axis=0)
        messages = [self._messages(counts[:, rank]) for rank in range(ranks)]
        # What nobody behind needs is not sent.
        last = ranks - 1 if self._gathered else int(np.flatnonzero(totals)[-1])
        incoming = [
            [(source, part) for source in range(rank - 1, -1, -1) for part in messages[source]] if rank <= last else []
            for rank in range(ranks)
        ]
        works = [self._work(counts, rank, incoming[rank], cached) for rank in range(ranks)]
        links = self._link_times(messages, incoming, last)
        # A rank without tokens computes one that stands in for them.
        rows = np.maximum(1, totals).tolist()
        sums = [np.array([self._tokens.sums(kind, tokens) for kind in self._shapes])[self._kinds] for tokens in rows]
        visits = None if self._gathered else self._visits(counts, cached)
        return ChainParts(messages, incoming, works, links, rows, sums, visits)

    def _chained(self, parts: ChainParts, cached: int, run: Simulation) -> tuple[Times, Times]:
        """``[N, layers]`` when each rank ends the layers whose prefixes go down the chain, and how long it waits."""
        layers = len(self._kinds) - (parts.visits is not None)
        if not layers:
            return np.empty((len(parts.works), 0)), np.empty((len(parts.works), 0))
        nothing: Times = np.empty((layers, 0))
        columns = [self._column(parts, ranks, layers, cached, run) for ranks in run.columns]
        handed, ends, waited = [nothing] * len(columns), [], []
        for place, ranks in enumerate(run.places):
            coming = [sum(tokens) * self._row_bytes for _, tokens in parts.incoming[place]]
            sums = parts.sums[place][:layers]
            chain = [
                ChainRank(
                    works[place]._replace(after=works[place].after - sums),
                    before[:, : len(coming)],
                    links[place - 1] if coming else np.empty(0),
                    held=HELD,
                )
                for before, (works, links) in zip(handed, columns, strict=True)
            ]
            ended = []
            for layer, seconds in enumerate(sums.tolist()):
                for rank, one in zip(ranks, chain, strict=True):
                    one.clock = run.now[rank]
                    one.layer()
                    if run.records:
                        _record(run, rank, rank - len(ranks), one, coming, layer)
                    run.now[rank] = one.clock
                self._mesh.sums(run, ranks, seconds, parts.rows[place], layer)
                ended.append(run.now[ranks[0]])
            ends.append(ended)
            waited.append(chain[0].waited)
            handed = [one.handing(len(parts.messages[place])) for one in chain]
        return np.array(ends), np.array(waited)

    def _column(
        self, parts: ChainParts, ranks: Sequence[int], layers: int, cached: int, run: Simulation
    ) -> tuple[list[LayerWork], list[Times]]:
        """Work and messages of the ranks of one chain, as they are there and slow each other down."""
        works = []
        for rank, work, sums in zip(ranks, parts.works, parts.sums, strict=True):
            computed = work._replace(after=work.after - sums).first(layers)
            slower = LayerWork(*(run.computing(rank, each) for each in computed))
            works.append(slower._replace(after=slower.after + sums[:layers]))
        links = [
            run.sending(ranks[place], ranks[place + 1], link[None].repeat(layers, axis=0))
            for place, link in enumerate(parts.links)
        ]
        works, links = sharing(works, links, self._profile.exposed_transfer, self._profile.exposed_compute)
        return in_step(works) if cached else works, links

    def _visits(self, counts: NDArray[np.int64], cached: Sequence[int]) -> tuple[float, float]:
        """Seconds of the wanted queries' attention, and of their way round all ranks if there are several to visit."""
        size = counts.shape[1]
        work = Workload(tuple(counts.sum(axis=1).tolist()), tuple(cached), size)
        kind = list(self._shapes)[self._kinds[-1]]
        if work not in self._visits_s:
            terms = LayerTimes(self._profile, self._shapes[kind], work).predict_last("pass_q").terms
            self._visits_s[work] = sum(seconds for term, seconds in terms.items() if term != "attention")
        alone = not any(cached) and np.count_nonzero(counts.sum(axis=0)) == 1
        held = [(int(row.max()) + past / size, row.any()) for row, past in zip(counts, cached, strict=True)]
        attention = sum(self._block(kind, 1, keys, between=0) for keys, asked in held if asked)
        return attention, 0.0 if alone else self._visits_s[work]

    # Work

    def _messages(self, tokens: NDArray[np.int64]) -> list[tuple[int, ...]]:
        """Tokens of each sequence in the messages that one rank's keys and values travel in."""
        bounds = np.concatenate([[0], np.cumsum(tokens)])
        return [
            tuple(np.diff(bounds.clip(start, stop)).tolist())
            for start, stop in pieces(int(bounds[-1]), self._chunk_tokens)
        ]

    def _work(self, counts: NDArray[np.int64], rank: int, incoming: list[Message], cached: Sequence[int]) -> LayerWork:
        rows = counts[:, rank].tolist()
        # A rank without tokens computes one that stands in for them.
        tokens = max(1, sum(rows))
        packing = self._profile.copy_bytes.at(self._row_bytes * sum(rows))
        keeping = self._keeping(sum(rows)) if rank == counts.shape[1] - 1 else 0.0
        kinds = list(self._shapes)
        size, last = counts.shape[1], len(self._kinds) - 1
        before = np.array([self._tokens.before(kind, tokens) + packing for kind in kinds])[self._kinds]
        local = np.array([keeping + self._local(kind, rows, cached, size) for kind in kinds])[self._kinds]
        chunks = np.array([self._chunks(kind, counts, rank, incoming, rows) for kind in kinds]).reshape(len(kinds), -1)
        chunks = chunks[self._kinds]
        after = np.array([self._tokens.after(kind, tokens) for kind in kinds])[self._kinds]
        before[-1] = self._tokens.before(last, tokens, wanted=len(rows))
        after[-1] = self._tokens.after(last, tokens, wanted=len(rows))
        local[-1] = 0.0
        chunks[-1] = 0.0
        if self._gathered:
            kind = kinds[self._kinds[-1]]
            # The last token of each sequence, where it is on this rank.
            asked = [int(row[rank] > 0 and not row[rank + 1 :].any()) for row in counts]
            own = sum(self._block(kind, 1, count, between=0) for count, one in zip(rows, asked, strict=True) if one)
            before[-1] += packing
            local[-1] = keeping + own + self._step_s + self._ring(kind, asked, cached, size)
            chunks[-1] = self._chunks(kind, counts, rank, incoming, asked)
        work = LayerWork(before, local, chunks, after)
        # A layer's kernels take their time to issue, however short they are.
        waits = np.maximum(0.0, self._profile.launch_s - work.total)
        return work._replace(after=after + waits)

    def _local(self, kind: int, rows: Sequence[int], cached: Sequence[int], size: int) -> float:
        """Seconds of attention to a rank's own tokens, and to what all ranks hold already."""
        window, kernels = self._shapes[kind].window, self._kernels[kind]
        squares = sum(
            kernels.square(count) if window is None or window >= count else kernels.windowed(count, count)
            for count in rows
        )
        return squares + self._step_s + self._ring(kind, rows, cached, size)

    def _keeping(self, tokens: int) -> float:
        """Seconds of putting keys and values where the last rank keeps all of them."""
        return self._profile.copy_fresh.at(tokens * self._row_bytes) if self._gathered else 0.0

    def _chunks(
        self, kind: int, counts: NDArray[np.int64], rank: int, incoming: list[Message], queries: Sequence[int]
    ) -> list[float]:
        """Seconds of attention of so many queries of each sequence to every chunk of the prefix."""
        kept = self._gathered and rank == counts.shape[1] - 1
        known: dict[Message, float] = {}
        for source, tokens in incoming:
            if (source, tokens) not in known:
                seconds = self._step_s + (self._keeping(sum(tokens)) if kept else 0.0)
                for row, keys, asking in zip(counts.tolist(), tokens, queries, strict=True):
                    seconds += self._block(kind, asking, keys, between=sum(row[source + 1 : rank]))
                known[source, tokens] = seconds
        return [known[message] for message in incoming]

    def _block(self, kind: int, rows: float, keys: float, *, between: int) -> float:
        """Seconds of attention to keys that are so many tokens older than the first of the rows."""
        shape = self._shapes[kind]
        if shape.window is not None:
            # Rows that still see the newest of the keys, and keys that the first row still sees.
            reach = max(0, shape.window - 1 - between)
            rows, keys = min(rows, reach), min(keys, reach)
        if not rows or not keys:
            return 0.0
        return self._kernels[kind].block(rows, keys) + self._profile.merge.at(rows * shape.heads * shape.value_dim)

    def _ring(self, kind: int, rows: Sequence[int], cached: Sequence[int], size: int) -> float:
        """Seconds of ring pass-KV over what the ranks hold already."""
        held = sum(cached) / size
        if not held:
            return 0.0
        transfer = self._profile.exchange.at(self._row_bytes * math.ceil(held))
        busy = sum(self._block(kind, n, p / size, between=0) for n, p in zip(rows, cached, strict=True))
        hops = (size - 1) * self._profile.overlapped(busy, transfer)
        return hops + busy + size * self._step_s

    # Links

    def _link_times(
        self, messages: list[list[tuple[int, ...]]], incoming: list[list[Message]], last: int
    ) -> list[Times]:
        """Per link, seconds of each of its messages in a layer, in the order they are sent."""
        links = []
        for rank in range(last):
            sizes = [sum(tokens) for tokens in messages[rank]] + [sum(tokens) for _, tokens in incoming[rank]]
            known = {size: self._profile.exchange.at(self._row_bytes * size) for size in set(sizes)}
            links.append(np.array([known[size] for size in sizes]))
        return links


def _record(run: Simulation, rank: int, sender: int, one: ChainRank, coming: Sequence[int], layer: int) -> None:
    """Events of a layer of one rank of the chain, and of what came to it."""
    work, transfers = one.work, one.transfers[layer]
    run.computed("dense", rank, float(work.before[layer]), layer)
    run.computed("attention", rank, float(work.local[layer]), layer)
    for chunk, nbytes in enumerate(coming):
        run.transfer(OPERATION, (sender, rank), one.arrivals[layer][chunk], transfers[chunk], nbytes, layer)
        run.wait(OPERATION, rank, one.pickups[layer][chunk], layer)
        run.computed("attention", rank, float(work.chunks[layer, chunk]), layer)
    run.computed("dense", rank, float(work.after[layer]), layer)
