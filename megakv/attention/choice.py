"""Which method serves a pass: the one place where `auto` is decided.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from megakv.attention.all_gather import AllGatherKV
from megakv.attention.local import Local
from megakv.attention.method import AttentionMethod
from megakv.attention.pass_kv import PassKV
from megakv.attention.pass_q import PassQ
from megakv.attention.replicated import Replicated
from megakv.attention.runahead import Runahead
from megakv.attention.tsp import TSP
from megakv.comm import Communicator
from megakv.config import ContextParallelConfig
from megakv.costmodel.attention_time import LayerTimes, attention_flops_rate, decode_seconds
from megakv.costmodel.context_parallel import (
    Workload,
    miss_rate_of_equal_bytes,
    miss_rate_of_equal_traffic,
    miss_rate_with_all_to_all,
    new_tokens_hiding_kv,
)
from megakv.costmodel.hardware import HardwareProfile, fingerprint, load_profile
from megakv.costmodel.policy_fit import PolicyFit, load_fit
from megakv.costmodel.shape import AttentionShape, ModelShape, local_heads

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
PROFILE_SETTING = "megakv.context_parallel.profile"
FIT_SETTING = "megakv.context_parallel.fit"


@dataclass(frozen=True)
class Evidence:
    """What `auto` decides from, equal on all ranks.

    Parameters
    ----------
    policy : str
    profile : HardwareProfile, optional
    fit : PolicyFit, optional
    """

    policy: str = "cost"
    profile: HardwareProfile | None = None
    fit: PolicyFit | None = None


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
    return rule(workload, shape, flops=attention_flops_rate(profile, shape), bandwidth=profile.bandwidth)


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
        ("replicated", "pass_q"), key=lambda method: decode_seconds(profile, model, workload, method, tp_size=tp_size)
    )


def load_evidence(
    config: ContextParallelConfig, comm: Communicator, *, heads: int, kv_heads: int, dtype: torch.dtype | None
) -> Evidence:
    """Read the files that the policy decides from. Every rank must call it.

    Parameters
    ----------
    config : ContextParallelConfig
    comm : Communicator
    heads, kv_heads : int
        Of the whole model.
    dtype : torch.dtype, optional
        Of the model; None where it is not known.

    Raises
    ------
    ValueError
        If a file that the policy needs was not named, cannot be used, belongs to another machine or model, or differs
        between ranks.
    MegaKVError
        On ranks whose own files are in order.
    """
    if config.profile is None and config.fit is None:
        return Evidence(config.policy)
    evidence: Evidence | None = None
    failure: Exception | None = None
    try:
        evidence = Evidence(
            config.policy,
            None if config.profile is None else load_profile(config.profile, setting=PROFILE_SETTING),
            None if config.fit is None else load_fit(config.fit, setting=FIT_SETTING),
        )
    except ValueError as error:
        failure = error
    comm.agree(failure)
    assert evidence is not None
    _check_equal(evidence, comm)
    if not config.accept_foreign_profile:
        _check_machine(evidence, config, comm, heads, kv_heads, dtype)
    return evidence


def _check_equal(evidence: Evidence, comm: Communicator) -> None:
    """Ranks that decide from different numbers would wait for each other for ever."""
    digests = [None if record is None else record.digest() for record in (evidence.profile, evidence.fit)]
    everyone = comm.gather_objects(digests)
    for index, setting in enumerate((PROFILE_SETTING, FIT_SETTING)):
        odd = [rank for rank, theirs in enumerate(everyone) if theirs[index] != everyone[0][index]]
        if odd:
            raise ValueError(
                f"{setting}: the file of rank {odd[0]} differs from that of rank 0; copy one to every host"
            )


def _check_machine(
    evidence: Evidence,
    config: ContextParallelConfig,
    comm: Communicator,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype | None,
) -> None:
    remedy = "measure here, or set megakv.context_parallel.accept_foreign_profile = true"
    here = fingerprint(comm, dtype or torch.float32)
    for record, setting, path in (
        (evidence.profile, PROFILE_SETTING, config.profile),
        (evidence.fit, FIT_SETTING, config.fit),
    ):
        if record is None:
            continue
        measured = record.fingerprint
        same_type = here if dtype is not None else here.model_copy(update={"dtype": measured.dtype})
        if differences := measured.differences(same_type):
            raise ValueError(f"{setting} = {path!r} was measured elsewhere: {'; '.join(differences)}; {remedy}")
    fit = evidence.fit
    wanted = (*local_heads(heads, kv_heads, comm.mesh.tp_size), comm.mesh.cp_size)
    if fit is not None and (fit.heads, fit.kv_heads, fit.ring_size) != wanted:
        raise ValueError(
            f"{FIT_SETTING} = {config.fit!r} was fitted to {fit.heads} query and {fit.kv_heads} KV heads a rank on "
            f"{fit.ring_size} context-parallel ranks, here {wanted[0]} and {wanted[1]} on {wanted[2]}; {remedy}"
        )
