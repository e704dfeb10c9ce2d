"""Predicted TTIT of a whole model: a decoding step through all layers, and its logits."""

from __future__ import annotations

from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.sliced import SlicedTimes

REPLICATED = ("replicated", "tensor")
"""Methods of which every rank has the queries of all new tokens."""


def decode_methods(cp_size: int, *, weights_here: bool = True) -> tuple[str, ...]:
    """Methods of decoding that ranks of a mesh can choose between.

    Weights that are not kept on the accelerator come to every rank whole: slices of them spare nothing.
    """
    if cp_size == 1:
        return ("pass_q",)
    return ("pass_q", *REPLICATED) if weights_here else ("pass_q", "replicated")


def ttit_seconds(
    profile: HardwareProfile, model: ModelShape, workload: Workload, method: str, *, tp_size: int = 1
) -> float:
    """Seconds of one decoding step of `generate`; sums over tensor-parallel ranks as far as the profile knows them.

    All ranks meet in every layer and at the end, where they are told the results and rank 0's word on going on. The
    last of them is late by a part of what all compute between two meetings, which a ring hides where every rank has
    queries of its own to attend with.

    method: ``pass_q``, where the sequences' tokens are spread over the ring, or ``replicated``: all ranks compute all,
        in ``tensor`` each its slice of the linears.
    """
    replicated, sequences = method in REPLICATED, len(workload.new)
    tokens = workload.total_new if replicated else -(-workload.total_new // workload.size)
    dense = TokenTimes(profile, model, tp_size=tp_size)
    lag = profile.lag if workload.size * tp_size > 1 else 0.0
    sliced = None
    if method == "tensor" and workload.size > 1:
        sliced = SlicedTimes(profile, model, tokens=tokens, size=workload.size, tp_size=tp_size)
    hiding = not replicated and 1 < workload.size <= sequences
    seconds = 0.0
    for index, count in model.layer_kinds:
        times = LayerTimes(profile, model.attention(tp_size=tp_size, layer=index), workload)
        prediction = times.predict("replicated" if replicated else method)
        attention = prediction.terms["attention"]
        sums = dense.sums(index, tokens)
        own = dense.layer(index, tokens) - sums - (0.0 if sliced is None else sliced.layer(index))
        late = max(0.0, lag * own - (attention / workload.size if hiding else 0.0)) + lag * attention
        seconds += count * max(prediction.seconds + own + late + sums, profile.launch_s)
    owners = 1 if replicated else min(workload.size, sequences)
    shared = 1 + owners if workload.size > 1 else 0
    heads = sequences if replicated else tokens
    if sliced is not None:
        # Logits that are gathered are on all ranks.
        seconds, shared = seconds - sliced.head(sequences), 1
    return seconds + dense.beside(heads, lag=lag, shared=shared)
