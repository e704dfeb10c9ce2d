"""Predicted TTIT of a whole model: a decoding step through all layers, and its logits."""

from __future__ import annotations

from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import ModelShape

REPLICATED = ("replicated", "tensor")
"""Methods of which every rank has the queries of all new tokens."""
SUM_BYTES = 4
"""Of an element that is summed over ranks, at most."""
CORE_BYTES_S, WAIT_S, WORTH_ACCELERATOR = 10e9, 10e-6, 32 << 20
"""Without a profile, and assumed rather than measured: bytes of weights that a core reads in a second, how long ranks
wait for each other beside what a message takes itself, and bytes that a device reads meanwhile, at 2 TB/s in 16 us."""


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


def worth_bytes(message_s: float | None) -> int:
    """Bytes of weights that a rank must be spared for a message to pay that takes so long; None: an accelerator's."""
    return WORTH_ACCELERATOR if message_s is None else round((message_s + WAIT_S) * CORE_BYTES_S)


class SlicedTimes:
    """What slices save of a step of decoding, on `size` context-parallel ranks that all compute `tokens`.

    Each part takes one message more. Those around attention are cut only where that pays.
    """

    def __init__(self, profile: HardwareProfile, model: ModelShape, *, tokens: int, size: int, tp_size: int = 1):
        self._profile, self._model, self._tokens = profile, model, tokens
        self._size, self._tp_size = size, tp_size
        self._dense = TokenTimes(profile, model, tp_size=tp_size)

    def layer(self, index: int) -> float:
        """Seconds that a layer takes less."""
        gains = self.gains(index)
        return gains.pop("feed_forward") + sum(max(0.0, gain) for gain in gains.values())

    def gains(self, index: int) -> dict[str, float]:
        """Those of one layer, by kind of linears: before and behind attention, and the feed-forward."""
        inputs, outputs, width = self._dense.projections(self._tokens)
        feed_forward = self._dense.feed_forward(index, self._tokens)
        gathered = self._message(width / self._size * self._model.element_bytes)
        summed = self._message(self._model.hidden * SUM_BYTES)
        return {
            "inputs": self._saved(inputs) - gathered,
            "outputs": self._saved(outputs) - summed,
            "feed_forward": self._saved(feed_forward) - summed if feed_forward else 0.0,
        }

    def head(self, sequences: int) -> float:
        """Seconds that the logits of all sequences take less, over all ranks of the mesh; they are on all at once."""
        ranks = self._size * self._tp_size
        row = self._model.vocab / ranks * self._model.element_bytes
        message = self._profile.all_gather.at(sequences * row * (ranks - 1))
        return self._dense.head(sequences) * (1 - 1 / ranks) - message

    def _saved(self, seconds: float) -> float:
        return seconds * (1 - 1 / self._size)

    def _message(self, row_bytes: float) -> float:
        return self._profile.all_gather.at(self._tokens * row_bytes * (self._size - 1))
