"""Predicted TTIT of a whole model: a decoding step through all layers, and its logits."""

from __future__ import annotations

from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import ModelShape


def decode_methods(cp_size: int) -> tuple[str, ...]:
    """Methods of decoding that ranks of a mesh can choose between."""
    return ("pass_q", "replicated") if cp_size > 1 else ("pass_q",)


def ttit_seconds(
    profile: HardwareProfile, model: ModelShape, workload: Workload, method: str, *, tp_size: int = 1
) -> float:
    """Seconds of one decoding step of `generate`; sums over tensor-parallel ranks as far as the profile knows them.

    All ranks meet in every layer and at the end, where they are told the results and rank 0's word on going on. The
    last of them is late by a part of what all compute between two meetings, which a ring hides where every rank has
    queries of its own to attend with.

    method: ``pass_q``, where the sequences' tokens are spread over the ring, or ``replicated``: all ranks compute all.
    """
    replicated, sequences = method == "replicated", len(workload.new)
    tokens = workload.total_new if replicated else -(-workload.total_new // workload.size)
    dense = TokenTimes(profile, model, tp_size=tp_size)
    lag = profile.lag if workload.size * tp_size > 1 else 0.0
    hiding = not replicated and 1 < workload.size <= sequences
    seconds = 0.0
    for index, count in model.layer_kinds:
        times = LayerTimes(profile, model.attention(tp_size=tp_size, layer=index), workload)
        prediction = times.predict(method)
        attention = prediction.terms["attention"]
        sums = dense.sums(index, tokens)
        own = dense.layer(index, tokens) - sums
        late = max(0.0, lag * own - (attention / workload.size if hiding else 0.0)) + lag * attention
        seconds += count * max(prediction.seconds + own + late + sums, profile.launch_s)
    owners = 1 if replicated else min(workload.size, sequences)
    shared = 1 + owners if workload.size > 1 else 0
    heads = sequences if replicated else tokens
    return seconds + dense.beside(heads, lag=lag, shared=shared)
