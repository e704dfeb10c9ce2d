"""Predicted TTFT of a whole model by prefill method: attention of all layers, what is computed beside it, logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from megakv.attention.runahead import CHUNK_TOKENS
from megakv.base.partition import Partition
from megakv.costmodel.attention_time import LayerTimes, Prediction
from megakv.costmodel.chain import Chain, ChainPrediction
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import ModelShape

EXPOSED = ("exposed", "collective", "straggle")
"""Terms of attention in which a rank waits for others."""


def alone(workload: Workload) -> tuple[Partition, ...]:
    """Partitions that give everything to the last rank."""
    return tuple((0,) * (workload.size - 1) + (tokens,) for tokens in workload.new)


class PrefillTimes:
    """Predictions for one pass over new tokens of one model; `kv` and `chunk_tokens` as in ``megakv.runahead``."""

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

    def seconds(self, method: str, partitions: Sequence[Partition] | None = None) -> float:
        """TTFT by ``single``, a ring method or ``runahead`` (`partitions`: tokens of every rank, per sequence)."""
        if method == "single":
            return self.chain(alone(self.workload)).seconds
        if method == "runahead":
            assert partitions is not None
            return self.chain(partitions).seconds + self._late_s
        return self._rings(method) + self._late_s

    def terms(self, method: str, partitions: Sequence[Partition] | None = None) -> dict[str, float]:
        """Where a method's `seconds` go; they sum to them.

        ``attention`` and ``dense`` are computed; ``exposed`` is waiting for other ranks and their tokens, and
        ``all_reduce`` for sums over tensor-parallel ranks.
        """
        terms = dict.fromkeys(("attention", "dense", "exposed", "all_reduce"), 0.0)
        for layer, count, wanted in self._alike:
            terms["all_reduce"] += count * self._tokens.sums(layer, self._most, wanted=wanted)
        if method in ("single", "runahead"):
            chain = self.chain(alone(self.workload) if method == "single" else partitions or ())
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

    @cached_property
    def _late_s(self) -> float:
        """How late the last rank is: by a part of what reading the weights takes, however many tokens share them."""
        return self._tokens.late_s(len(self.workload.new)) if self.workload.size * self._tp_size > 1 else 0.0

    @property
    def _most(self) -> int:
        """New tokens of the rank with most, where they are spread evenly."""
        return -(-self.workload.total_new // self.workload.size)

    def _attention(self, layer: int, method: str) -> Prediction:
        """One layer's attention; seconds and their terms are made from the same prediction."""
        if (layer, method) not in self._predictions:
            times = self._layers[self._model.layers[layer]]
            last = layer == len(self._model.layers) - 1
            self._predictions[layer, method] = times.predict_last(method) if last else times.predict(method)
        return self._predictions[layer, method]

    def _rings(self, method: str) -> float:
        seconds = self._tokens.end(len(self.workload.new), shared=self.workload.size > 1)
        for layer, count, wanted in self._alike:
            # Kernels are issued while those before them compute, but not past a collective, which all ranks wait in.
            attention = self._attention(layer, method)
            together = attention.terms.get("collective", 0.0)
            work = self._tokens.layer(layer, self._most, wanted=wanted) + attention.seconds - together
            seconds += count * (work + self._profile.idle_s(work) + together)
        return seconds
