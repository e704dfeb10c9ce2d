"""Predicted TTFT of a whole model by prefill method: attention of all layers, what is computed beside it, logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from megakv.attention.runahead import CHUNK_TOKENS
from megakv.costmodel.attention_time import LayerTimes, Prediction
from megakv.costmodel.chain import Chain, ChainPrediction
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import ModelShape
from megakv.runahead.partition import Partition

EXPOSED = ("exposed", "collective", "straggle")
"""Terms of attention in which a rank waits for others."""


def alone(workload: Workload) -> tuple[Partition, ...]:
    """Partitions that give everything to the last rank."""
    return tuple((0,) * (workload.size - 1) + (tokens,) for tokens in workload.new)


class PrefillTimes:
    """Predictions for one pass over new tokens of one model.

    tp_size: tensor-parallel degree of every context-parallel rank.
    kv: ``sharded`` or ``last``, as ``megakv.runahead.kv``.
    chunk_tokens: as ``megakv.runahead.chunk_tokens``.
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
        self.workload = workload
        self._profile = profile
        self._model = model
        self._tp_size = tp_size
        self._tokens = TokenTimes(profile, model, tp_size=tp_size)
        self._layers = {
            index: LayerTimes(profile, model.attention(tp_size=tp_size, layer=index), workload)
            for index, _ in model.layer_kinds
        }
        self._chain = Chain(profile, model, tp_size=tp_size, kv=kv, chunk_tokens=chunk_tokens)
        self._predictions: dict[tuple[int, str, bool], Prediction] = {}
        self._chains: dict[tuple[Partition, ...], ChainPrediction] = {}

    def seconds(self, method: str, partitions: Sequence[Partition] | None = None) -> float:
        """TTFT of a method.

        method: ``single``, ``runahead``, ``pass_kv``, ``pass_q``, ``all_gather``, ``tsp`` or ``tsp_causal``.
        partitions: for ``runahead``, the tokens of every rank, per sequence.
        """
        if method == "single":
            return self.chain(alone(self.workload)).seconds
        if method == "runahead":
            assert partitions is not None
            return self.chain(partitions).seconds + self._late_s
        return self._rings(method) + self._late_s

    def terms(self, method: str, partitions: Sequence[Partition] | None = None) -> dict[str, float]:
        """Where a method's seconds go; parameters as `seconds`, which they sum to.

        Returns ``attention`` and ``dense`` are computed; ``exposed`` is waiting for other ranks and their tokens,
            ``all_reduce`` for sums over tensor-parallel ranks.
        """
        tokens, sequences = -(-self.workload.total_new // self.workload.size), len(self.workload.new)
        layers = {index: count for index, count in self._model.layer_kinds}
        kinds = {self._model.layers[index]: index for index in layers}
        final, last = kinds[self._model.layers[-1]], len(self._model.layers) - 1
        layers[final] -= 1
        terms = dict.fromkeys(("attention", "dense", "exposed", "all_reduce"), 0.0)
        terms["all_reduce"] = self._tokens.sums(last, tokens, wanted=sequences)
        terms["all_reduce"] += sum(count * self._tokens.sums(index, tokens) for index, count in layers.items())
        if method in ("single", "runahead"):
            chain = self.chain(alone(self.workload) if method == "single" else partitions or ())
            slowest = int(chain.ends_s[:, -1].argmax())
            terms["exposed"] = max(0.0, float(chain.waited_s[slowest].sum()))
            terms["dense"] = self._tokens.layer(last, tokens, wanted=sequences) - terms["all_reduce"]
            terms["dense"] += sum(count * self._tokens.layer(index, tokens) for index, count in layers.items())
            terms["attention"] = chain.seconds - sum(terms.values())
            terms["exposed"] += self._late_s if method == "runahead" else 0.0
            return terms
        parts = [(count, self._attention(index, method)) for index, count in layers.items()]
        for count, prediction in [*parts, (1, self._attention(final, method, last=True))]:
            for name, seconds in prediction.terms.items():
                terms["exposed" if name in EXPOSED else "attention"] += count * seconds
        terms["exposed"] += self._late_s
        terms["dense"] = self.seconds(method) - sum(terms.values())
        return terms

    def chain(self, partitions: Sequence[Partition]) -> ChainPrediction:
        """The timeline of the runahead chain."""
        key = tuple(partitions)
        if key not in self._chains:
            self._chains[key] = self._chain.predict(key, self.workload.cached)
        return self._chains[key]

    @cached_property
    def _late_s(self) -> float:
        """How late the last rank is: by a part of what reading the weights takes, however many tokens share them."""
        return self._tokens.late_s(len(self.workload.new)) if self.workload.size * self._tp_size > 1 else 0.0

    def _attention(self, index: int, method: str, *, last: bool = False) -> Prediction:
        """One layer's attention; seconds and their terms are made from the same prediction."""
        key = index, method, last
        if key not in self._predictions:
            times = self._layers[index]
            self._predictions[key] = times.predict_last(method) if last else times.predict(method)
        return self._predictions[key]

    def _rings(self, method: str) -> float:
        """Of the rank with the most tokens, where they are spread evenly."""
        tokens = -(-self.workload.total_new // self.workload.size)
        sequences = len(self.workload.new)
        last = len(self._model.layers) - 1

        def layer(index: int, attention: Prediction, wanted: float | None = None) -> float:
            # Kernels are issued while those before them compute, but not past a collective, which all ranks wait in.
            together = attention.terms.get("collective", 0.0)
            work = self._tokens.layer(index, tokens, wanted=wanted) + attention.seconds - together
            return work + self._profile.idle_s(work) + together

        kinds = {self._model.layers[index]: index for index, _ in self._model.layer_kinds}
        kind = kinds[self._model.layers[last]]
        whole = {index: layer(index, self._attention(index, method)) for index in self._layers}
        layers = sum(count * whole[index] for index, count in self._model.layer_kinds) - whole[kind]
        asked = layer(last, self._attention(kind, method, last=True), sequences)
        return layers + asked + self._tokens.end(sequences, shared=self.workload.size > 1)
