"""Predicted TTIT of a whole model: a decoding step through all layers, and its logits."""

from __future__ import annotations

from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import ModelShape


def ttit_seconds(
    profile: HardwareProfile, model: ModelShape, workload: Workload, method: str, *, tp_size: int = 1
) -> float:
    """Seconds of one decoding step; sums over tensor-parallel ranks as far as the profile knows their links.

    All ranks meet in every layer and at the end, where they are told the results and rank 0's word on going on.

    Parameters
    ----------
    profile : HardwareProfile
    model : ModelShape
    workload : Workload
        One new token of each sequence, behind what is cached.
    method : str
        ``pass_q``, where the sequences' tokens are spread over the ring, or ``replicated``, where all ranks compute all
        of them.
    tp_size : int
    """
    replicated = method == "replicated"
    tokens = workload.total_new if replicated else -(-workload.total_new // workload.size)
    dense = TokenTimes(profile, model, tp_size=tp_size)
    late = 1 + profile.lag if workload.size * tp_size > 1 else 1.0
    seconds = 0.0
    for index, count in model.layer_kinds:
        times = LayerTimes(profile, model.attention(tp_size=tp_size, layer=index), workload)
        sums = dense.sums(index, tokens)
        work = times.predict(method).seconds + late * (dense.layer(index, tokens) - sums) + sums
        seconds += count * max(work, profile.launch_s)
    owners = 1 if replicated else min(workload.size, len(workload.new))
    shared = 1 + owners if workload.size > 1 else 0
    heads = len(workload.new) if replicated else tokens
    return seconds + (late - 1) * dense.head(heads) + dense.end(heads, shared=shared)
