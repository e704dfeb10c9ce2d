"""Time to first token of a whole model by prefill method: attention of all layers, what is computed beside it, logits.

Both are made of the same steps. Rings and gathers, whose layers are alike, are predicted by the steps of their slowest
rank; a chain is predicted as it is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

from megakv.attention.runahead import CHUNK_TOKENS
from megakv.base.partition import Partition, even
from megakv.costmodel.attention_time import LayerTimes, Prediction
from megakv.costmodel.chain import Chain
from megakv.costmodel.context_parallel import Workload, rank_totals
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.simulated_layers import MeshLayers, RingLayer, last_bytes
from megakv.costmodel.simulation import CALM, Disturbances, Simulation
from megakv.distributed.layouts import balanced_tokens

METHODS = ("pass_kv", "pass_q", "all_gather", "tsp", "tsp_causal", "runahead")
EXPOSED = ("exposed", "collective", "straggle")
"""Terms of attention in which a rank waits for others."""


def alone(workload: Workload) -> tuple[Partition, ...]:
    """Partitions that give everything to the last rank."""
    return tuple((0,) * (workload.size - 1) + (tokens,) for tokens in workload.new)


class _RingTimes(NamedTuple):
    """A layer of a ring method on its slowest rank: attention, what is computed beside it, and waiting for kernels."""

    attention: Prediction
    dense_s: float
    idle_s: float


class PrefillTimes:
    """One pass over new tokens of one model; `kv` and `chunk_tokens` as in ``megakv.runahead``."""

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
        self.workload = workload
        self._profile = profile
        self._model = model
        self._tp_size = tp_size
        self._tokens = TokenTimes(profile, model, tp_size=tp_size)
        self._layers = {
            model.layers[kind]: LayerTimes(profile, model.attention(tp_size=tp_size, layer=kind), workload)
            for kind, _ in model.layer_kinds
        }
        # How many layers are like which, and what is wanted of the last one.
        last = len(model.layers) - 1
        alike = ((kind, count - (model.layers[kind] == model.layers[last]), None) for kind, count in model.layer_kinds)
        self._alike = [each for each in alike if each[1]] + [(last, 1, len(workload.new))]
        self._chain = Chain(profile, model, tp_size=tp_size, kv=kv, chunk_tokens=chunk_tokens)

    # Predicted

    def seconds(self, method: str, partitions: Sequence[Partition] | None = None) -> float:
        """TTFT by ``single``, a ring method or ``runahead`` (`partitions`: tokens of every rank, per sequence)."""
        return sum(self.terms(method, partitions).values())

    def terms(self, method: str, partitions: Sequence[Partition] | None = None) -> dict[str, float]:
        """Where a method's `seconds` go: computing, and waiting for others, their tokens (``exposed``) and sums."""
        terms = dict.fromkeys(("attention", "dense", "exposed", "all_reduce"), 0.0)
        for layer, count, wanted in self._alike:
            terms["all_reduce"] += count * self._tokens.sums(layer, self._most, wanted=wanted)
        if method in ("single", "runahead"):
            cuts = alone(self.workload) if method == "single" else tuple(partitions or self.even())
            chain = self._chain.predict(cuts, self.workload.cached)
            slowest = int(chain.ends_s[:, -1].argmax())
            dense = (n * self._tokens.layer(layer, self._most, wanted=wanted) for layer, n, wanted in self._alike)
            terms["dense"] = sum(dense) - terms["all_reduce"]
            terms["exposed"] = max(0.0, float(chain.waited_s[slowest].sum()))
            terms["attention"] = chain.seconds - sum(terms.values())
            terms["exposed"] += self._late_s if method == "runahead" else 0.0
            return terms
        for layer, count, _ in self._alike:
            ring = self._ring(layer, method)
            for name, seconds in ring.attention.terms.items():
                terms["exposed" if name in EXPOSED else "attention"] += count * seconds
            terms["dense"] += count * (ring.dense_s + ring.idle_s)
        terms["exposed"] += self._late_s
        terms["dense"] += self._end_s - self._late_s
        return terms

    # Simulated

    def play(
        self,
        method: str,
        partitions: Sequence[Partition] | None = None,
        disturbances: Disturbances = CALM,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> Simulation:
        """A pass by one of `METHODS`; a ValueError for a ring over fewer than 2N tokens."""
        ranks = self.workload.size * self._tp_size
        run = Simulation(ranks, disturbances, tp_size=self._tp_size, progress=progress)
        if method == "runahead":
            self._chain.predict(tuple(partitions or self.even()), self.workload.cached, run)
        else:
            self._play_rings(run, method)
        last = run.seconds
        for rank in run.places[-1]:
            run.now[rank] = last
            run.compute("dense", rank, self._end_s)
        return run

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

    def _play_rings(self, run: Simulation, method: str) -> None:
        times, tokens, size, last = self._tokens, self._most, self.workload.size, len(self._model.layers) - 1
        mesh = MeshLayers(self._model, times, tp_size=self._tp_size)
        new, held = (balanced_tokens(counts, size) for counts in (self.workload.new, self.workload.cached))
        kept = [a + b for a, b in zip(new, held, strict=True)]
        rings = {kind: RingLayer(layer, method, new, kept) for kind, layer in self._layers.items()}
        idle = {self._model.layers[index]: self._ring(index, method).idle_s for index, *_ in self._alike[:-1]}
        for layer, kind in enumerate(self._model.layers[:-1]):
            sums, everyone = times.sums(layer, tokens), range(len(run.now))
            after = times.after(layer, tokens) - sums + idle[kind]
            run.compute_all("dense", everyone, [times.before(layer, tokens)] * len(everyone), layer)
            for ranks in run.columns:
                rings[kind].play(run, ranks, layer)
            for ranks in run.places:
                run.compute_all("dense", ranks, [after] * len(ranks), layer)
                mesh.sums(run, ranks, sums, tokens, layer)
        ring, asked = self._ring(last, method), len(self.workload.new)
        visits = ring.attention.terms["attention"], ring.attention.seconds - ring.attention.terms["attention"]
        before = times.before(last, tokens, wanted=asked)
        after = times.after(last, tokens, wanted=asked) + ring.idle_s
        sent = last_bytes(method, self._layers[self._model.layers[-1]].shape, new, kept, sequences=asked, asking=0)
        mesh.last(run, [before] * size, [after] * size, [tokens] * size, visits, sent, sequences=asked)

    # What both are made of

    @cached_property
    def _late_s(self) -> float:
        """How late the last rank is: by a part of what reading the weights takes, however many tokens share them."""
        return self._tokens.late_s(len(self.workload.new)) if self.workload.size * self._tp_size > 1 else 0.0

    @property
    def _end_s(self) -> float:
        """Seconds behind the last layer, until all ranks have the logits."""
        return self._tokens.end(len(self.workload.new), shared=self.workload.size > 1) + self._late_s

    @property
    def _most(self) -> int:
        """New tokens of the rank with most, where they are spread evenly."""
        return -(-self.workload.total_new // self.workload.size)

    def _ring(self, layer: int, method: str) -> _RingTimes:
        last = layer == len(self._model.layers) - 1
        times, wanted = self._layers[self._model.layers[layer]], len(self.workload.new) if last else None
        attention = times.predict_last(method) if last else times.predict(method)
        work = self._tokens.layer(layer, self._most, wanted=wanted)
        # Kernels are issued while those before them compute, but not past a collective, which all ranks wait in.
        idle = self._profile.idle_s(work + attention.seconds - attention.terms.get("collective", 0.0))
        return _RingTimes(attention, work - self._tokens.sums(layer, self._most, wanted=wanted), idle)
