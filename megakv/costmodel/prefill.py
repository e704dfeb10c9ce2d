"""Time to first token of a whole model by prefill method: attention of all layers, what is computed beside it, logits.

Both are made of the same steps. Rings and gathers, whose layers are alike, are predicted by the steps of their slowest
rank; a chain is predicted as it is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from megakv.attention.runahead import CHUNK_TOKENS
from megakv.base.partition import Partition, even
from megakv.costmodel.attention_time import LayerTimes, Prediction
from megakv.costmodel.chain import Chain, ChainPrediction
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
        self._predictions: dict[tuple[int, str], Prediction] = {}
        self._chains: dict[tuple[Partition, ...], ChainPrediction] = {}

    # Predicted

    def seconds(self, method: str, partitions: Sequence[Partition] | None = None) -> float:
        """TTFT by ``single``, a ring method or ``runahead`` (`partitions`: tokens of every rank, per sequence)."""
        if method == "single":
            return self.chain(alone(self.workload)).seconds
        if method == "runahead":
            return self.chain(partitions or self.even()).seconds + self._late_s
        return self._end_s + sum(count * self._layer_s(layer, method) for layer, count, _ in self._alike)

    def terms(self, method: str, partitions: Sequence[Partition] | None = None) -> dict[str, float]:
        """Where a method's `seconds` go; they sum to them.

        ``attention`` and ``dense`` are computed; ``exposed`` is waiting for other ranks and their tokens, and
        ``all_reduce`` for sums over tensor-parallel ranks.
        """
        terms = dict.fromkeys(("attention", "dense", "exposed", "all_reduce"), 0.0)
        for layer, count, wanted in self._alike:
            terms["all_reduce"] += count * self._tokens.sums(layer, self._most, wanted=wanted)
        if method in ("single", "runahead"):
            chain = self.chain(alone(self.workload) if method == "single" else partitions or self.even())
            slowest = int(chain.ends_s[:, -1].argmax())
            terms["exposed"] = max(0.0, float(chain.waited_s[slowest].sum()))
            dense = (n * self._tokens.layer(layer, self._most, wanted=wanted) for layer, n, wanted in self._alike)
            terms["dense"] = sum(dense) - terms["all_reduce"]
            terms["attention"] = chain.seconds - sum(terms.values())
            terms["exposed"] += self._late_s if method == "runahead" else 0.0
            return terms
        for layer, count, _ in self._alike:
            for name, seconds in self._attention(layer, method).terms.items():
                terms["exposed" if name in EXPOSED else "attention"] += count * seconds
        terms["exposed"] += self._late_s
        terms["dense"] = self.seconds(method) - sum(terms.values())
        return terms

    def chain(self, partitions: Sequence[Partition]) -> ChainPrediction:
        key = tuple(partitions)
        if key not in self._chains:
            self._chains[key] = self._chain.predict(key, self.workload.cached)
        return self._chains[key]

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
        for layer, kind in enumerate(self._model.layers[:-1]):
            sums = times.sums(layer, tokens)
            after = times.after(layer, tokens) - sums + self._idle_s(layer, method)
            everyone = range(len(run.now))
            run.compute_all("dense", everyone, [times.before(layer, tokens)] * len(everyone), layer)
            for ranks in run.columns:
                rings[kind].play(run, ranks, layer)
            for ranks in run.places:
                run.compute_all("dense", ranks, [after] * len(ranks), layer)
                mesh.sums(run, ranks, sums, tokens, layer)
        terms, asked = self._attention(last, method).terms, len(self.workload.new)
        visits = terms["attention"], sum(seconds for term, seconds in terms.items() if term != "attention")
        before = times.before(last, tokens, wanted=asked)
        after = times.after(last, tokens, wanted=asked) + self._idle_s(last, method)
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

    def _attention(self, layer: int, method: str) -> Prediction:
        """One layer's attention; seconds and their terms are made from the same prediction."""
        kind, last = self._model.layers[layer], layer == len(self._model.layers) - 1
        key = self._model.layers.index(kind) if not last else layer
        if (key, method) not in self._predictions:
            times = self._layers[kind]
            self._predictions[key, method] = times.predict_last(method) if last else times.predict(method)
        return self._predictions[key, method]

    def _busy_s(self, layer: int, method: str) -> float:
        """Seconds of a layer of a ring method but for collectives, which all ranks wait in."""
        attention = self._attention(layer, method)
        wanted = len(self.workload.new) if layer == len(self._model.layers) - 1 else None
        dense = self._tokens.layer(layer, self._most, wanted=wanted)
        return dense + attention.seconds - attention.terms.get("collective", 0.0)

    def _idle_s(self, layer: int, method: str) -> float:
        """Seconds until a layer's kernels are issued: while those before them compute, but not past a collective."""
        return self._profile.idle_s(self._busy_s(layer, method))

    def _layer_s(self, layer: int, method: str) -> float:
        together = self._attention(layer, method).terms.get("collective", 0.0)
        return self._busy_s(layer, method) + self._idle_s(layer, method) + together
