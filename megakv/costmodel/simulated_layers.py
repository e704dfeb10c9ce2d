"""Layers of a prefill on a simulated mesh: those of a ring or a gather, sums, and a last one that few tokens ask of."""

from __future__ import annotations

from collections.abc import Sequence

from megakv.costmodel.attention_time import RINGS, LayerTimes, RankSteps
from megakv.costmodel.context_parallel import sent_bytes
from megakv.costmodel.dense import SUMS, TokenTimes, all_reduce_bytes
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.costmodel.simulation import Simulation
from megakv.costmodel.timeline import added


class MeshLayers:
    """What ends the layers of every method, on the ranks of a mesh."""

    def __init__(self, model: ModelShape, times: TokenTimes, *, tp_size: int):
        self._row_bytes = model.hidden * model.element_bytes
        self._last = len(model.layers) - 1
        self._times = times
        self._tp_size = tp_size

    def sums(self, run: Simulation, ranks: Sequence[int], seconds: float, tokens: int, layer: int) -> None:
        """The all-reduces of a layer over tensor-parallel ranks, both at its end; one rank stands for all of them."""
        if seconds:
            nbytes = SUMS * all_reduce_bytes(tokens * self._row_bytes, self._tp_size)
            run.meet("all_reduce", ranks, seconds, [nbytes] * len(ranks), layer)

    def last(
        self,
        run: Simulation,
        before_s: Sequence[float],
        after_s: Sequence[float],
        tokens: Sequence[int],
        visits: tuple[float, float],
        sent: Sequence[dict[str, int]],
        *,
        sequences: int,
    ) -> list[float]:
        """A last layer of which one token of each sequence is wanted: its query goes round all ranks.

        `visits` are seconds of attention, and of all that is waited for; the others are per context-parallel rank.
        Returns when each of those is ready for the queries of others.
        """
        for ranks, seconds in zip(run.places, before_s, strict=True):
            run.compute_all("dense", ranks, [seconds] * len(ranks), self._last)
            run.compute_all("attention", ranks, [visits[0]] * len(ranks), self._last)
        ready = run.now[:: len(run.places[0])]
        if len(before_s) > 1:
            for ranks in run.columns:
                run.meet(next(iter(sent[0])), ranks, visits[1], [sum(each.values()) for each in sent], self._last)
        for ranks, seconds, rows in zip(run.places, after_s, tokens, strict=True):
            sums = self._times.sums(self._last, rows, wanted=sequences)
            run.compute_all("dense", ranks, [seconds - sums] * len(ranks), self._last)
            self.sums(run, ranks, sums, sequences, self._last)
        return ready


def last_bytes(
    method: str, shape: AttentionShape, new: Sequence[int], kept: Sequence[int], *, sequences: int, asking: int
) -> list[dict[str, int]]:
    """Per context-parallel rank, bytes by operation of a last layer that one token of each sequence asks."""
    wanted = [sequences * (place == asking) for place in range(len(new))]
    return [sent_bytes(method, shape, new=new, kept=kept, rank=place, wanted=wanted) for place in range(len(new))]


class RingLayer:
    """One kind of layer by a ring method; `new` and `kept` are tokens by context-parallel rank."""

    def __init__(self, times: LayerTimes, method: str, new: Sequence[int], kept: Sequence[int]):
        self._profile = times.profile
        self._method = method
        self._size = len(new)
        self._ways: list[RankSteps] = [times.steps(method, place) for place in range(self._size)]
        shape = times.shape
        row, shards = (shape.query_row_bytes, new) if method == "pass_q" else (shape.kv_row_bytes, kept)
        self._shard_bytes = [row * count for count in shards]
        self._sent = [sent_bytes(method, shape, new=new, kept=kept, rank=place) for place in range(self._size)]

    def play(self, run: Simulation, ranks: Sequence[int], layer: int) -> None:
        """A layer of one column of the mesh."""
        ways, travelling = self._ways, self._method in RINGS and self._size > 1
        run.compute_all("dense", ranks, [way.pack_s for way in ways], layer)
        if not travelling and self._size > 1:
            run.meet("all_gather", ranks, ways[0].gather_s, [each["all_gather"] for each in self._sent], layer)
        for step in range(self._size):
            run.compute_all("attention", ranks, [way.overhead_s for way in ways], layer)
            if travelling and step + 1 < self._size:
                self._pass_on(run, ranks, layer, step)
            else:
                run.compute_all("attention", ranks, [sum(way.steps[step]) for way in ways], layer)
        if travelling and self._method == "pass_q":
            run.compute_all("dense", ranks, [way.unpack_s for way in ways], layer)
            seconds = max(way.return_s + way.straggle_s for way in ways)
            run.meet("pass_q_return", ranks, seconds, [each["pass_q_return"] for each in self._sent], layer)
            run.compute_all("attention", ranks, [way.combine_s for way in ways], layer)

    def _pass_on(self, run: Simulation, ranks: Sequence[int], layer: int, step: int) -> None:
        """Every rank attends to a shard and sends it to the next one, which posts its receive at this step."""
        late, busy = self._profile.exposed_transfer, self._profile.exposed_compute
        pairs = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        computed = [run.computing(rank, sum(way.steps[step])) for way, rank in zip(self._ways, ranks, strict=True)]
        sent = [run.sending(*pair, way.transfer_s) for way, pair in zip(self._ways, pairs, strict=True)]
        ends = []
        for place, (seconds, pair) in enumerate(zip(sent, pairs, strict=True)):
            # Both slow each other down; a transfer concerns two processors, a processor two transfers.
            beside = (computed[place] + computed[(place + 1) % self._size]) / 2
            seconds *= 1 + added(busy, beside, seconds, late)
            ends.append(max(run.now[rank] for rank in pair) + seconds)
            nbytes = self._shard_bytes[(place - step) % self._size]
            run.transfer(self._method, pair, ends[-1], seconds, nbytes, layer)
        for place, (seconds, rank) in enumerate(zip(computed, ranks, strict=True)):
            seconds *= 1 + added(late, (sent[place] + sent[place - 1]) / 2, seconds, busy)
            run.computed("attention", rank, seconds, layer)
        for end, pair in zip(ends, pairs, strict=True):
            for rank in pair:
                run.wait(self._method, rank, end, layer)
