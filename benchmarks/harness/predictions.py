"""What the cost model predicts of a benchmark's own methods, from a profile measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile, load_profile
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.shape import ModelShape

from .profiles import measured_profile
from .world import World

RINGS = ("pass_kv", "pass_q", "all_gather")
DECODING = ("replicated", "pass_q")
ALONE = ("single", "in_place", "tp_gloo")


@dataclass(frozen=True)
class Predictions:
    """Predictions for one model on the ranks of one launch.

    Parameters
    ----------
    profile : HardwareProfile
    model : ModelShape
    size : int
        Ranks.
    """

    profile: HardwareProfile
    model: ModelShape
    size: int

    def prefill(self, method: str, new: int, cached: int = 0) -> float | None:
        """Seconds of reading a prompt; None for what no formula is about (DeepSpeed's shared-memory sums)."""
        if method in RINGS:
            return PrefillTimes(self.profile, self.model, Workload((new,), (cached,), self.size)).seconds(method)
        if method not in ALONE:
            return None
        # Plain models compute all of the last layer; MegaKV's leaves out what nobody reads.
        tp_size = self.size if method == "tp_gloo" else 1
        dense, workload = TokenTimes(self.profile, self.model, tp_size=tp_size), Workload((new,), (cached,), 1)
        seconds = dense.head(1)
        for index, count in self.model.layer_kinds:
            attention = LayerTimes(self.profile, self.model.attention(tp_size=tp_size, layer=index), workload)
            seconds += count * (dense.layer(index, new) + attention.predict("single").seconds)
        return seconds

    def decode(self, method: str, context: int, batch: int = 1) -> float | None:
        """Seconds of a decoding step; None where a cache is copied at every step, or ranks stand idle."""
        if method not in (*DECODING, "in_place", "tp_gloo"):
            return None
        size = self.size if method in DECODING else 1
        tp_size = self.size if method == "tp_gloo" else 1
        workload = Workload((1,) * batch, (context,) * batch, size)
        way = method if method in DECODING else "replicated"
        return ttit_seconds(self.profile, self.model, workload, way, tp_size=tp_size)


def measured_predictions(
    world: World, model: PreTrainedModel, *, seconds: float, timeout_s: float
) -> Predictions | None:
    """Predictions from a profile that is measured now; None without a time to do so, or a ring. Every rank calls it."""
    if not seconds or world.size < 2:
        return None
    with measured_profile(world, model, seconds=seconds, timeout_s=timeout_s) as path:
        return predictions_of(path, world, model)


def predictions_of(path: str, world: World, model: PreTrainedModel) -> Predictions:
    """Predictions from a profile's file."""
    return Predictions(load_profile(path), ModelShape.from_config(model.config, dtype=model.dtype), world.size)
