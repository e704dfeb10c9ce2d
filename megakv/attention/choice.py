"""Which method serves a pass: the one place where `auto` is decided.

A prefill is decided in two steps. Before the layers run, `plan_prefill` decides how the prompt is spread: with a
profile, over the ranks of a runahead chain, on one rank, or balanced for the ring, whichever is predicted to have the
first token first. Where it is balanced, each layer then takes pass-KV or pass-Q by its own shape.

Policies (``megakv.context_parallel.policy``):

``cost``
    The method that the cost model predicts to be fastest, from the hardware profile. Without a profile, prefill sends
    the fewer bytes, pass-Q's All2All included, and decode replicates queries for fewer sequences than ranks.
``alg1``, ``alg5``
    The paper's Algorithm 1, and Algorithm 5 which counts the All2All, with the compute and bandwidth of the profile.
``fitted``
    The empirical rule of Appendix D with the constants of a fit file. None are shipped: the published ones would choose
    pass-Q for a full prefill of 128K tokens, against the paper's own text.

The three rules of the paper choose the prefill method; decode is chosen by the cost model or the batch size. Prefill is
never given to ``all_gather`` by itself: it holds the keys and values of all ranks at once, which a long context cannot.
Nor to ``tsp`` and ``tsp_causal``, which are there to be measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megakv.attention.all_gather import AllGatherKV
from megakv.attention.evidence import Evidence as Evidence
from megakv.attention.evidence import load_evidence as load_evidence
from megakv.attention.local import Local
from megakv.attention.method import AttentionCall, AttentionMethod
from megakv.attention.pass_kv import PassKV
from megakv.attention.pass_q import PassQ
from megakv.attention.replicated import Replicated
from megakv.attention.runahead import Runahead
from megakv.attention.tsp import TSP
from megakv.config import ContextParallelConfig
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import (
    Workload,
    miss_rate_of_equal_bytes,
    miss_rate_of_equal_traffic,
    miss_rate_with_all_to_all,
    new_tokens_hiding_kv,
)
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.kernels import Kernels
from megakv.costmodel.planner import PrefillPlanner
from megakv.costmodel.prefill import alone
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.runahead.partition import Partition, even

METHODS: dict[str, Callable[[], AttentionMethod]] = {
    "pass_kv": PassKV,
    "pass_q": PassQ,
    "all_gather": AllGatherKV,
    "replicated": Replicated,
    "local": Local,
    "runahead": Runahead,
    "tsp": TSP,
    "tsp_causal": AllGatherKV,
}
PREFILL = ("pass_kv", "pass_q", "all_gather", "runahead", "tsp", "tsp_causal")
DECODE = ("pass_q", "replicated")
PREFILL_CANDIDATES = ("pass_kv", "pass_q")
CONTIGUOUS = ("runahead", "tsp", "tsp_causal")
"""Prefill methods whose ranks compute consecutive tokens."""


@dataclass(frozen=True)
class PrefillChoice:
    """How a prompt is spread over the ranks.

    Parameters
    ----------
    method : str, optional
        That of all layers; None where they choose among those of the balanced layout.
    partitions : tuple of tuple of int, optional
        Per sequence, consecutive tokens of every rank; None for the balanced layout.
    name : str, optional
        What `auto` found fastest: ``single``, ``runahead``, ``pass_kv`` or ``pass_q``. None: nothing was predicted.
    predicted_s : dict
        The predicted TTFT of every candidate.
    """

    method: str | None = None
    partitions: tuple[Partition, ...] | None = None
    name: str | None = None
    predicted_s: Mapping[str, float] = field(default_factory=dict)


def plan_prefill(
    config: ContextParallelConfig,
    evidence: Evidence,
    workload: Workload,
    *,
    sizes: Callable[[int, int], Partition],
    planner: PrefillPlanner | None = None,
    compressed: bool = False,
) -> PrefillChoice:
    """How a pass is spread: as was asked for, or as `auto` has it.

    Parameters
    ----------
    config : ContextParallelConfig
    evidence : Evidence
    workload : Workload
    sizes : callable
        Tokens of every rank of the runahead chain, for so many new tokens behind so many cached ones.
    planner : PrefillPlanner, optional
        Predictions for this model; None where there is no profile, or the model's sizes are not known.
    compressed : bool
        Whether some of what is cached was compressed.
    """
    if compressed and config.prefill != "runahead":
        # What was compressed does not travel: queries come to it.
        return PrefillChoice("pass_q")
    lengths = list(zip(workload.new, workload.cached, strict=True))
    if config.prefill in CONTIGUOUS:
        chain = config.prefill == "runahead"
        return PrefillChoice(
            config.prefill, tuple(sizes(t, p) if chain else even(t, workload.size) for t, p in lengths)
        )
    if config.prefill != "auto" or planner is None or evidence.policy != "cost" or workload.size == 1:
        return PrefillChoice()
    predicted = planner.seconds(workload, sizes)
    name = min(predicted, key=lambda candidate: predicted[candidate])
    if name == "runahead":
        return PrefillChoice("runahead", tuple(sizes(t, p) for t, p in lengths), name, predicted)
    if name == "single":
        return PrefillChoice("runahead", alone(workload), name, predicted)
    return PrefillChoice(None, None, name, predicted)


def choose_prefill(config: ContextParallelConfig, evidence: Evidence, workload: Workload, shape: AttentionShape) -> str:
    """The prefill method that was asked for, or `auto`'s for a layer of this shape."""
    return config.prefill if config.prefill != "auto" else auto("prefill", evidence, workload, shape=shape)


def choose_decode(
    config: ContextParallelConfig, evidence: Evidence, workload: Workload, model: ModelShape | None, tp_size: int
) -> str:
    """The decode method that was asked for, or `auto`'s for a model; None where its shape is not known."""
    return (
        config.decode if config.decode != "auto" else auto("decode", evidence, workload, model=model, tp_size=tp_size)
    )


def last_layer_method(method: str, call: AttentionCall) -> str:
    """The method of a last layer that few queries are wanted of: they travel, instead of all keys and values.

    TSP and all-gather pass-KV are measured against, and keep the form in which they were published. A chain whose last
    rank gathers all keys and values has to bring them there.
    """
    if method not in ("pass_kv", "pass_q", "runahead") or (method == "runahead" and call.layout.gathered):
        return method
    alone = np.count_nonzero(call.table.counts().sum(axis=1)) == 1
    return "local" if alone else "pass_q"


def auto(
    phase: Literal["prefill", "decode"],
    evidence: Evidence,
    workload: Workload,
    *,
    shape: AttentionShape | None = None,
    model: ModelShape | None = None,
    tp_size: int = 1,
) -> str:
    """The method for one pass. The same on all ranks whose arguments are the same.

    Parameters
    ----------
    phase : str
        ``prefill`` or ``decode``.
    evidence : Evidence
    workload : Workload
        Its tokens.
    shape : AttentionShape, optional
        For prefill: the layer on this rank. Layers may differ.
    model : ModelShape, optional
        For decode, where all layers share a layout: replicated queries cost more outside attention too.
    tp_size : int
        Ranks that share a layer's weights.
    """
    if phase == "decode":
        return _decode(evidence.profile, workload, model, tp_size)
    assert shape is not None
    if evidence.policy == "fitted":
        assert evidence.fit is not None
        cached = workload.total - workload.total_new
        return "pass_kv" if evidence.fit.h(workload.total_new, cached) > 0 else "pass_q"
    profile = evidence.profile
    if profile is None:
        return "pass_q" if workload.miss_rate < miss_rate_of_equal_traffic(shape) else "pass_kv"
    if evidence.policy == "cost":
        times = LayerTimes(profile, shape, workload)
        return min(PREFILL_CANDIDATES, key=lambda method: times.predict(method).seconds)
    rule = algorithm_1 if evidence.policy == "alg1" else algorithm_5
    return rule(workload, shape, flops=Kernels(profile, shape).flops, bandwidth=profile.bandwidth)


def algorithm_1(workload: Workload, shape: AttentionShape, *, flops: float, bandwidth: float) -> str:
    """Context parallelism, Algorithm 1: pass-KV where attention hides it, or where its message is no larger."""
    hiding = new_tokens_hiding_kv(shape, size=workload.size, flops=flops, bandwidth=bandwidth)
    large = workload.total_new >= hiding or workload.miss_rate >= miss_rate_of_equal_bytes(shape)
    return "pass_kv" if large else "pass_q"


def algorithm_5(workload: Workload, shape: AttentionShape, *, flops: float, bandwidth: float) -> str:
    """Context parallelism, Algorithm 5: Algorithm 1 with pass-Q's All2All counted against it."""
    hiding = new_tokens_hiding_kv(shape, size=workload.size, flops=flops, bandwidth=bandwidth)
    threshold = miss_rate_with_all_to_all(
        shape, workload.total_new, size=workload.size, flops=flops, bandwidth=bandwidth
    )
    return "pass_kv" if workload.total_new >= hiding or workload.miss_rate >= threshold else "pass_q"


def _decode(profile: HardwareProfile | None, workload: Workload, model: ModelShape | None, tp_size: int) -> str:
    if profile is None or model is None:
        # Sharding fewer sequences than ranks would leave ranks idle.
        return "replicated" if len(workload.new) < workload.size else "pass_q"
    return min(
        ("replicated", "pass_q"), key=lambda method: ttit_seconds(profile, model, workload, method, tp_size=tp_size)
    )
