"""Which method serves a pass: the one place where `auto` is decided.

A prefill is decided in two steps. Before the layers run, `plan_prefill` decides how the prompt is spread: with a
profile, over the ranks of a runahead chain, on one rank, or balanced for the ring, whichever is predicted to have the
first token first. Where it is balanced, each layer then takes pass-KV or pass-Q by its own shape.

That goes by ``megakv.context_parallel.policy``: ``cost`` takes what the cost model predicts to be fastest from the
hardware profile, or without one what sends the fewer bytes, pass-Q's All2All included, and on processors pass-KV where
attention hides its messages, by what a little of both took here; ``alg1`` and ``alg5`` are the paper's Algorithms 1 and
5, with the compute and bandwidth of the profile; ``fitted`` is the rule of Appendix D with the
constants of a fit file. None are shipped: the published ones would choose pass-Q for a full prefill of 128K tokens,
against the paper's own text. Decode is chosen by the cost model, or by bytes of weights and the batch size.

Prefill is given to ``all_gather`` where a prompt is so short that all of its layers are one call on ranks that share
memory (`PassPlanner.plan`), and never else: it holds the keys and values of all ranks at once, which a long context
cannot. Nor is it to ``tsp`` and ``tsp_causal``, which are there to be measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from megakv.attention.method import AttentionCall
from megakv.attention.methods import METHODS, is_contiguous
from megakv.base.errors import CombinationError
from megakv.base.partition import Partition, even
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import (
    Workload,
    miss_rate_of_equal_bytes,
    miss_rate_of_equal_traffic,
    miss_rate_with_all_to_all,
    new_tokens_hiding_kv,
)
from megakv.costmodel.decoding import SlicedTimes, decode_methods, ttit_seconds
from megakv.costmodel.hardware import HardwareProfile, fingerprint, load_profile
from megakv.costmodel.kernels import Kernels
from megakv.costmodel.prefill import alone
from megakv.costmodel.shape import AttentionShape, ModelShape, local_heads
from megakv.distributed.agreement import Agreement
from megakv.distributed.comm import Communicator
from megakv.forward.config import ContextParallelConfig
from megakv.forward.policy_fit import PolicyFit, load_fit
from megakv.forward.prefill_planner import PrefillPlanner

PREFILL_CANDIDATES = ("pass_kv", "pass_q")
PROFILE_SETTING = "megakv.context_parallel.profile"
FIT_SETTING = "megakv.context_parallel.fit"


@dataclass(frozen=True)
class Evidence:
    """What `auto` decides from, equal on all ranks."""

    policy: str = "cost"
    profile: HardwareProfile | None = None
    fit: PolicyFit | None = None
    flops_per_byte: float | None = None
    """Of attention, on a rank, in the time that a byte of the ring takes; where there is no profile, if at all."""


@dataclass(frozen=True)
class PrefillChoice:
    """How a prompt is spread over the ranks."""

    method: str | None = None
    """That of all layers; None where they choose among those of the balanced layout."""
    partitions: tuple[Partition, ...] | None = None
    """Per sequence, consecutive tokens of every rank; None for the balanced layout."""
    name: str | None = None
    """What `auto` found fastest: ``single``, ``runahead``, ``pass_kv`` or ``pass_q``. None: nothing was predicted."""
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    """The predicted TTFT of every candidate."""


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

    `sizes` gives the tokens of every rank of the chain for so many new tokens behind so many cached ones. There is no
    `planner` where there is no profile, or the model's sizes are not known; `compressed` says that some of what is
    cached is.
    """
    if compressed and config.prefill != "runahead":
        # What was compressed does not travel: queries come to it.
        return PrefillChoice("pass_q")
    lengths = list(zip(workload.new, workload.cached, strict=True))
    if is_contiguous(config.prefill):
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


def serves_first_turns_only(prefill: str, *, compresses: bool, divided: bool) -> bool:
    """Whether a method asked for gives way to pass-Q where something is cached: compressed, or divided by replicas.

    That does not travel. A chain's new keys and values do, where what is cached was compressed.
    """
    return prefill not in ("auto", "pass_q") and (divided or (compresses and prefill != "runahead"))


def last_layer_method(method: str, call: AttentionCall) -> str:
    """The method of a last layer that few queries are wanted of: they travel, instead of all keys and values.

    TSP and all-gather pass-KV are measured against, and keep the form in which they were published. A chain whose last
    rank gathers all keys and values has to bring them there.
    """
    if not METHODS[method].narrows or call.layout.gathered:
        return method
    alone = np.count_nonzero(call.table.counts().sum(axis=1)) == 1
    return "local" if alone else "pass_q"


def choose_prefill(evidence: Evidence, workload: Workload, shape: AttentionShape) -> str:
    """The method of a layer's prefill by its shape on this rank: layers may differ. It is the same on equal ranks."""
    if evidence.policy == "fitted":
        assert evidence.fit is not None
        cached = workload.total - workload.total_new
        return "pass_kv" if evidence.fit.h(workload.total_new, cached) > 0 else "pass_q"
    profile = evidence.profile
    if profile is None:
        if (ratio := evidence.flops_per_byte) is not None:
            if workload.total_new >= new_tokens_hiding_kv(shape, size=workload.size, flops=ratio, bandwidth=1.0):
                return "pass_kv"
        return "pass_q" if workload.miss_rate < miss_rate_of_equal_traffic(shape) else "pass_kv"
    if evidence.policy == "cost":
        times = LayerTimes(profile, shape, workload)
        return min(PREFILL_CANDIDATES, key=lambda method: times.predict(method).seconds)
    rule = algorithm_1 if evidence.policy == "alg1" else algorithm_5
    return rule(workload, shape, flops=Kernels(profile, shape).flops, bandwidth=profile.bandwidth)


def algorithm_1(workload: Workload, shape: AttentionShape, *, flops: float, bandwidth: float) -> str:
    """Context parallelism, Algorithm 1: pass-KV where attention hides it, or where its message is no larger."""
    return _hidden_or_smaller(workload, shape, miss_rate_of_equal_bytes(shape), flops, bandwidth)


def algorithm_5(workload: Workload, shape: AttentionShape, *, flops: float, bandwidth: float) -> str:
    """Context parallelism, Algorithm 5: Algorithm 1 with pass-Q's All2All counted against it."""
    threshold = miss_rate_with_all_to_all(
        shape, workload.total_new, size=workload.size, flops=flops, bandwidth=bandwidth
    )
    return _hidden_or_smaller(workload, shape, threshold, flops, bandwidth)


def _hidden_or_smaller(
    workload: Workload, shape: AttentionShape, threshold: float, flops: float, bandwidth: float
) -> str:
    hiding = new_tokens_hiding_kv(shape, size=workload.size, flops=flops, bandwidth=bandwidth)
    return "pass_kv" if workload.total_new >= hiding or workload.miss_rate >= threshold else "pass_q"


def choose_decode(
    evidence: Evidence, workload: Workload, model: ModelShape | None, tp_size: int, *, slices: bool | None = None
) -> str:
    """The method of decoding for a whole model, if its shape is known: its layers share a layout.

    Replicated queries cost more outside attention too. `slices` says whether those of a layer's feed-forward are worth
    a message; None: ranks have none.
    """
    profile = evidence.profile
    if profile is None or model is None:
        if slices:
            return "tensor"
        # Sharding fewer sequences than ranks would leave ranks idle.
        return "replicated" if len(workload.new) < workload.size else "pass_q"
    return min(
        decode_methods(workload.size, weights_here=slices is not None),
        key=lambda method: ttit_seconds(profile, model, workload, method, tp_size=tp_size),
    )


def choose_slices(
    evidence: Evidence, spared: Mapping[str, int], model: ModelShape | None, *, size: int, tp_size: int, worth: int
) -> dict[str, bool]:
    """Of which kinds of a layer's linears slices take less time than they spare, in decoding one token.

    By the cost model where it knows machine and model, else by the bytes that each kind is `spared` of, and those that
    a message is `worth`.
    """
    if evidence.profile is None or model is None:
        return {kind: nbytes >= worth for kind, nbytes in spared.items()}
    times = SlicedTimes(evidence.profile, model, tokens=1, size=size, tp_size=tp_size)
    return {kind: gain > 0 for kind, gain in times.gains(0).items()}


def load_evidence(
    config: ContextParallelConfig, comm: Communicator, *, heads: int, kv_heads: int, dtype: torch.dtype | None
) -> Evidence:
    """Read the files that the policy decides from, and refuse those of others. Every rank must call it.

    Heads are of the whole model; `dtype` is None where that of the model is not known.
    """
    agreement, profile, fit = Agreement(comm), None, None
    if (path := config.profile) is not None:
        profile = agreement.same_file(PROFILE_SETTING, partial(load_profile, path, setting=PROFILE_SETTING))
    if (path := config.fit) is not None:
        fit = agreement.same_file(FIT_SETTING, partial(load_fit, path, setting=FIT_SETTING))
    evidence = Evidence(config.policy, profile, fit)
    if config.accept_foreign_profile or evidence == Evidence(config.policy):
        return evidence
    remedy = "measure here, or set megakv.context_parallel.accept_foreign_profile = true"
    here = fingerprint(comm, dtype or torch.float32)
    for key, path, record in (("profile", config.profile, profile), ("fit", config.fit, fit)):
        if record is not None:
            measured = record.fingerprint
            same_type = here if dtype is not None else here.model_copy(update={"dtype": measured.dtype})
            if differences := measured.differences(same_type):
                raise CombinationError(
                    "foreign",
                    f"megakv.context_parallel.{key} = {path!r} was measured elsewhere: {'; '.join(differences)}; "
                    f"{remedy}",
                )
    wanted = (*local_heads(heads, kv_heads, comm.mesh.tp_size), comm.mesh.cp_size)
    if fit is not None and (fit.heads, fit.kv_heads, fit.ring_size) != wanted:
        raise CombinationError(
            "foreign",
            f"{FIT_SETTING} = {config.fit!r} was fitted to {fit.heads} query and {fit.kv_heads} KV heads a rank on "
            f"{fit.ring_size} context-parallel ranks, here {wanted[0]} and {wanted[1]} on {wanted[2]}; {remedy}",
        )
    return evidence
