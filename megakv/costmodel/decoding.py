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
    tokens = workload.total_new if method == "replicated" else -(-workload.total_new // workload.size)
    dense = TokenTimes(profile, model, tp_size=tp_size)
    seconds = 0.0
    for index, count in model.layer_kinds:
        times = LayerTimes(profile, model.attention(tp_size=tp_size, layer=index), workload)
        work = times.predict(method).seconds + dense.layer(index, tokens)
        seconds += count * max(work, profile.launch_s)
    return seconds + dense.head(len(workload.new))
