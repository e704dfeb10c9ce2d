"""Prefill as programs of the simulator: rings, gathers and the runahead chain, on a context-parallel x tensor-parallel
mesh.

The programs are made of the same terms as the closed forms, `LayerTimes`, `Chain` and `TokenTimes`; what these add up,
the simulator lets happen.
"""

from __future__ import annotations

from collections.abc import Sequence

from megakv.attention.chain import OPERATION
from megakv.attention.runahead import CHUNK_TOKENS
from megakv.costmodel.chain import Chain
from megakv.costmodel.context_parallel import Workload, balanced_tokens, sent_bytes
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.ring_steps import LayerSteps
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.costmodel.simulation_chain import ChainTasks
from megakv.costmodel.simulation_program import Program
from megakv.costmodel.simulation_rings import RingTasks
from megakv.costmodel.tensor_parallel import SUMS, all_reduce_bytes
from megakv.costmodel.timeline import in_step
from megakv.runahead.partition import Partition, even

RINGS = ("pass_kv", "pass_q", "all_gather", "tsp", "tsp_causal")
METHODS = (*RINGS, "runahead")


class PrefillProgram:
    """Programs of one pass over a prompt.

    profile, model, workload, tp_size, kv, chunk_tokens: as `megakv.costmodel.prefill.PrefillTimes`.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        model: ModelShape,
        workload: Workload,
        *,
        tp_size: int = 1,
        kv: str = "sharded",
        chunk_tokens: int = CHUNK_TOKENS,
    ):
        self._profile = profile
        self._model = model
        self._workload = workload
        self._tp_size = tp_size
        self._gathered = kv == "last"
        self._times = TokenTimes(profile, model, tp_size=tp_size)
        self._chain = Chain(profile, model, tp_size=tp_size, kv=kv, chunk_tokens=chunk_tokens)
        kinds = {model.layers[index]: index for index, _ in model.layer_kinds}
        self._kinds = [kinds[layer] for layer in model.layers]

    @property
    def world(self) -> int:
        """Ranks of the mesh."""
        return self._workload.size * self._tp_size

    def build(self, method: str, partitions: Sequence[Partition] | None = None) -> Program:
        """The program of a method.

        method: one of `METHODS`.
        partitions: for ``runahead``, the tokens of every rank, per sequence; even ones if left out.
        Raises ValueError: for a ring over fewer than 2N tokens.
        """
        program = Program(self.world)
        # What every rank did last.
        last: list[list[int]] = [[] for _ in range(self.world)]
        if method == "runahead":
            self._add_chain(program, last, partitions or self.even())
        else:
            self._add_rings(program, last, method)
        ends = [index for each in last for index in each]
        end = self._times.end(len(self._workload.new), shared=self._workload.size > 1)
        for rank in range(self.world - self._tp_size, self.world):
            program.compute("dense", rank, end, ends)
        return program

    def even(self) -> tuple[Partition, ...]:
        """Even cuts of every sequence."""
        return tuple(even(tokens, self._workload.size) for tokens in self._workload.new)

    def tokens(self, method: str, partitions: Sequence[Partition] | None = None) -> list[int]:
        """New tokens of every rank of the world."""
        if method == "runahead":
            cuts: Sequence[Sequence[int]] = partitions or self.even()
        elif method in ("tsp", "tsp_causal"):
            cuts = self.even()
        else:
            cuts = [balanced_tokens(tokens, self._workload.size) for tokens in self._workload.new]
        return [sum(counts) for counts in zip(*cuts, strict=True) for _ in range(self._tp_size)]

    # Rings

    def _add_rings(self, program: Program, last: list[list[int]], method: str) -> None:
        size, workload = self._workload.size, self._workload
        tokens = -(-workload.total_new // size)
        new = [sum(c) for c in zip(*(balanced_tokens(n, size) for n in workload.new), strict=True)]
        held = [sum(c) for c in zip(*(balanced_tokens(n, size) for n in workload.cached), strict=True)]
        kept = [a + b for a, b in zip(new, held, strict=True)]
        rings = {
            index: RingTasks(LayerSteps(self._profile, self._shape(index), workload), method, new, kept)
            for index, _ in self._model.layer_kinds
        }
        for layer, kind in enumerate(self._kinds[:-1]):
            sums = self._times.sums(layer, tokens)
            before = self._times.before(layer, tokens)
            after = self._times.after(layer, tokens) - sums
            after += self._profile.idle_s(before + after + sums + rings[kind].busy_s)
            for rank in range(self.world):
                last[rank] = [program.compute("dense", rank, before, last[rank], layer=layer)]
            for column in range(self._tp_size):
                ranks = list(range(column, self.world, self._tp_size))
                rings[kind].add_attention(program, last, ranks, layer)
            for rank in range(self.world):
                last[rank] = [program.compute("dense", rank, after, last[rank], layer=layer)]
            self._add_sums(program, last, [sums] * size, [tokens] * size, layer)
        final, layer = self._shape(self._kinds[-1]), len(self._kinds) - 1
        attention, way, together = LayerSteps(self._profile, final, workload).wanted(method)
        asked = len(workload.new)
        wanted = [asked, *[0] * (size - 1)]
        sent = [sent_bytes(method, final, new=new, kept=kept, rank=place, wanted=wanted) for place in range(size)]
        before = self._times.before(layer, tokens, wanted=asked)
        after = self._times.after(layer, tokens, wanted=asked)
        after += self._profile.idle_s(before + attention + way - together + after)
        self._add_last(program, last, [before] * size, [after] * size, [tokens] * size, (attention, way), sent)

    def _add_last(
        self,
        program: Program,
        last: list[list[int]],
        before_s: Sequence[float],
        after_s: Sequence[float],
        tokens: Sequence[int],
        visits: tuple[float, float],
        sent: Sequence[dict[str, int]],
    ) -> None:
        """A last layer of which one token of each sequence is wanted: its query goes round all ranks.

        program, last: as in the other methods.
        before_s, after_s, tokens: per context-parallel rank, what precedes and follows attention, and new tokens.
        visits: seconds of attention, and of all that is waited for.
        sent: per context-parallel rank, bytes by operation.
        """
        layer, count = len(self._kinds) - 1, len(self._workload.new)
        attention_s, way_s = visits
        for rank in range(self.world):
            done = program.compute("dense", rank, before_s[rank // self._tp_size], last[rank], layer=layer)
            last[rank] = [program.compute("attention", rank, attention_s, (done,), layer=layer)]
        for column in range(self._tp_size):
            ranks = list(range(column, self.world, self._tp_size))
            ready = [index for rank in ranks for index in last[rank]]
            if len(ranks) > 1:
                name = next(iter(sent[0]))
                nbytes = [sum(each.values()) for each in sent]
                parts = program.collective(name, ranks, way_s, ready, nbytes=nbytes, layer=layer)
                for rank, index in zip(ranks, parts, strict=True):
                    last[rank] = [index]
        sums = [self._times.sums(layer, rows, wanted=count) for rows in tokens]
        for rank in range(self.world):
            place = rank // self._tp_size
            after = after_s[place] - sums[place]
            last[rank] = [program.compute("dense", rank, after, last[rank], layer=layer)]
        self._add_sums(program, last, sums, [count] * len(sums), layer)

    # The chain

    def _add_chain(self, program: Program, last: list[list[int]], partitions: Sequence[Partition]) -> None:
        parts = self._chain.parts(partitions, self._workload.cached)
        whole = len(self._kinds) - (parts.visits is not None)
        works = [work.first(whole) for work in parts.works]
        if sum(self._workload.cached):
            works = in_step(works)
        # A rank without tokens computes one that stands in for them.
        rows = [max(1, sum(counts)) for counts in zip(*partitions, strict=True)]
        columns = [
            ChainTasks(program, range(column, self.world, self._tp_size), parts, works)
            for column in range(self._tp_size)
        ]
        for layer, kind in enumerate(self._kinds[:whole]):
            wanted = len(self._workload.new) if layer == len(self._kinds) - 1 else None
            sums = [self._times.sums(layer, tokens, wanted=wanted) for tokens in rows]
            for column in columns:
                column.add_layer(layer, self._shape(kind).kv_row_bytes, last, sums)
            self._add_sums(program, last, sums, rows, layer)
        if parts.visits is not None:
            new = [sum(counts) for counts in zip(*partitions, strict=True)]
            asking = max(place for place, count in enumerate(new) if count)
            wanted_of = [len(self._workload.new) if place == asking else 0 for place in range(len(new))]
            shape = self._shape(self._kinds[-1])
            sent = [
                sent_bytes(OPERATION, shape, new=new, kept=new, rank=place, wanted=wanted_of)
                for place in range(len(new))
            ]
            before = [float(work.before[-1]) for work in parts.works]
            after = [float(work.after[-1]) for work in parts.works]
            self._add_last(program, last, before, after, rows, parts.visits, sent)

    # Both

    def _shape(self, kind: int) -> AttentionShape:
        return self._model.attention(tp_size=self._tp_size, layer=kind)

    def _add_sums(
        self, program: Program, last: list[list[int]], seconds: Sequence[float], tokens: Sequence[int], layer: int
    ) -> None:
        """The all-reduces of a layer over tensor-parallel ranks, both at its end."""
        for place, each in enumerate(seconds):
            if self._tp_size == 1 or not each:
                continue
            group = range(place * self._tp_size, (place + 1) * self._tp_size)
            ready = [index for rank in group for index in last[rank]]
            hidden = tokens[place] * self._model.hidden * self._model.element_bytes
            nbytes = SUMS * all_reduce_bytes(hidden, self._tp_size)
            parts = program.collective("all_reduce", group, each, ready, nbytes=nbytes, layer=layer)
            for rank, index in zip(group, parts, strict=True):
                last[rank] = [index]
