"""What the cost model predicts of a benchmark's own methods, from profiles measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile, load_profile
from megakv.costmodel.plain import PlainTimes
from megakv.costmodel.prefill import PrefillTimes, alone
from megakv.costmodel.shape import ModelShape
from megakv.runahead.partition import Partition

from .profiles import LONE, keep_profile, lone_profile, measured_profile
from .world import World

TENSOR_PARALLEL = ("tp", "tp_gloo")
SINGLE = ("single", "single_masked", "single_idle", "in_place", "in_place_idle")
GENERATE_SHARES = 3
"""Before its first pass `generate` tells all ranks rank 0's random state, and waits for all: as long as three results.
"""


@dataclass(frozen=True)
class Predictions:
    """Predictions for one model on the ranks of one launch."""

    profile: HardwareProfile  # Of all ranks at once
    model: ModelShape
    size: int  # Ranks
    lone: HardwareProfile | None = None  # Of one rank while the others stand idle
    tp_size: int = 1  # Tensor-parallel degree of MegaKV's own methods

    def prefill(
        self,
        method: str,
        new: int,
        cached: int = 0,
        *,
        partition: Partition | None = None,
        generating: bool = False,
    ) -> float | None:
        """Seconds of reading a prompt, in a process without memory to use again; None for what was not measured."""
        if method in TENSOR_PARALLEL or method in SINGLE:
            plain = self._plain(method)
            if plain is None:
                return None
            tp_size = 1 if method in SINGLE else self.size
            seconds = plain.prefill(new, masked=method == "single_masked", generating=generating)
            return seconds + TokenTimes(self.profile, self.model, tp_size=tp_size).first_s(new)
        profile = self.profile.without_links() if method == "kvr_silent" else self.profile
        work = Workload((new,), (cached,), self.size // self.tp_size)
        times = PrefillTimes(profile, self.model, work, tp_size=self.tp_size)
        tokens = TokenTimes(profile, self.model, tp_size=self.tp_size)
        begun = tokens.first_s(-(-new // work.size)) + (self._begun() if generating else 0.0)
        if method == "one_rank":
            partition = alone(work)[0]
        if partition is not None:
            return begun + times.seconds("runahead", (partition,))
        return begun + times.seconds(method)

    def decode(self, method: str, context: int, batch: int = 1) -> float | None:
        """Seconds of a decoding step; None for what was not measured."""
        if method in TENSOR_PARALLEL or method in SINGLE:
            plain = self._plain(method)
            copied = not method.startswith("in_place")
            return None if plain is None else plain.decode(context, batch, copied=copied)
        work = Workload((1,) * batch, (context,) * batch, self.size // self.tp_size)
        return ttit_seconds(self.profile, self.model, work, method, tp_size=self.tp_size)

    def _begun(self) -> float:
        """What MegaKV's `generate` takes before its first pass."""
        shared = GENERATE_SHARES * self.profile.share_s if self.size > 1 else 0.0
        return shared + TokenTimes(self.profile, self.model).begin_s

    def _plain(self, method: str) -> PlainTimes | None:
        if method not in TENSOR_PARALLEL:
            profile = self.lone if method.endswith("_idle") else self.profile
            return None if profile is None else PlainTimes(profile, self.model)
        shared = method == "tp" and self.profile.sum_times(self.size, shared_memory=True) is not None
        return PlainTimes(self.profile, self.model, tp_size=self.size, shared_memory=shared)


def measured_predictions(
    world: World,
    model: PreTrainedModel,
    *,
    seconds: float,
    timeout_s: float,
    results: str | None = None,
    idle: bool = False,
) -> Predictions | None:
    """Predictions from profiles that are measured now; None without a time to do so. Every rank calls it."""
    if not seconds:
        return None
    alone = world.size < 2
    lone = None
    if idle or alone:
        part = seconds if alone else seconds / 2
        lone = lone_profile(world, shape_of(model), seconds=part)
        keep_profile(world, lone, results, f"{LONE}{world.size}")
        if alone:
            return Predictions(lone, shape_of(model), world.size, lone)
    with measured_profile(world, shape_of(model), seconds=seconds, timeout_s=timeout_s) as path:
        found = predictions_of(path, world, model, lone=lone)
    keep_profile(world, found.profile, results, str(world.size))
    return found


def predictions_of(
    path: str, world: World, model: PreTrainedModel, *, lone: HardwareProfile | None = None, tp_size: int = 1
) -> Predictions:
    """Predictions from a profile's file."""
    return Predictions(load_profile(path), shape_of(model), world.size, lone, tp_size)


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Its sizes, in the type that it computes in."""
    return ModelShape.from_config(model.config, dtype=model.dtype)
