"""Hardware profiles of the ranks and links that a benchmark runs on, and the cost model's predictions from them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from megakv.base.partition import Partition
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.prefill import PrefillTimes, alone
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.stopwatch import Alone
from megakv.distributed.comm import Communicator
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import make_mesh
from megakv.injection.layer_kind import is_kind
from megakv.launcher.ranks import progress
from megakv.planner.measure.kernels import Matrices
from megakv.planner.measure.profile import measure_profile

from .world import World

OWN = (
    "pass_kv", "pass_q", "all_gather", "replicated", "tensor", "tsp", "tsp_causal", "kvr_e", "kvr_s", "kvr_p",
    "one_rank",
)  # fmt: skip
"""Methods of MegaKV that a benchmark names itself: no other library's time is predicted."""
GENERATE_SHARES = 3
"""Before its first pass `generate` tells all ranks rank 0's random state, and waits for all: as long as three results.
"""


@dataclass(frozen=True)
class Predictions:
    """Predictions of MegaKV's methods for one model on the ranks of one launch."""

    profile: HardwareProfile  # Of all ranks at once
    model: ModelShape
    size: int  # Ranks
    tp_size: int = 1

    def prefill(
        self, method: str, new: int, cached: int = 0, *, partition: Partition | None = None, generating: bool = False
    ) -> float | None:
        """Seconds of reading a prompt, in a process without memory to use again; None for another library."""
        if method not in OWN:
            return None
        profile, work = self.profile, Workload((new,), (cached,), self.size // self.tp_size)
        times = PrefillTimes(profile, self.model, work, tp_size=self.tp_size)
        begun = TokenTimes(profile, self.model, tp_size=self.tp_size).first_s(-(-new // work.size))
        if generating:
            begun += GENERATE_SHARES * profile.share_s * (self.size > 1) + profile.begin_s + profile.added.begin_s
        if method == "one_rank":
            partition = alone(work)[0]
        return begun + (times.seconds(method) if partition is None else times.seconds("runahead", (partition,)))

    def decode(self, method: str, context: int, batch: int = 1) -> float | None:
        """Seconds of a decoding step; None for another library."""
        if method not in OWN:
            return None
        work = Workload((1,) * batch, (context,) * batch, self.size // self.tp_size)
        return ttit_seconds(self.profile, self.model, work, method, tp_size=self.tp_size)


def predictions_of(profile: HardwareProfile, config: PreTrainedConfig, dtype: torch.dtype, size: int) -> Predictions:
    """Predictions for a model, whose prompts a processor computes by blocks of rows where its layers are known."""
    by_blocks = profile.fingerprint.accelerator == "cpu" and is_kind(config.model_type)
    return Predictions(profile, replace(ModelShape.from_config(config, dtype=dtype), fused=by_blocks), size)


def measured(
    world: World, config: PreTrainedConfig, dtype: torch.dtype, arguments: argparse.Namespace, *, tp_size: int = 1
) -> Predictions | None:
    """Predictions from a profile measured now; None without time to measure. Every rank must call it."""
    if not arguments.profile_seconds:
        return None
    profile = measured_profile(world, ModelShape.from_config(config, dtype=dtype), arguments, tp_size=tp_size)
    return replace(predictions_of(profile, config, dtype, world.size), tp_size=tp_size)


def measured_profile(
    world: World, model: ModelShape, arguments: argparse.Namespace, *, tp_size: int = 1
) -> HardwareProfile:
    """Measure a profile with a model's heads, as ``megakv profile`` does. Every rank must call it."""
    if world.size == 1:
        return lone_profile(world.device, model, arguments.profile_seconds)
    mesh = make_mesh(cp_size=world.size // tp_size, tp_size=tp_size, timeout_s=arguments.timeout)
    # Sums over all ranks, as DeepSpeed's tensor parallelism forms them: by every way that there is.
    whole = make_mesh(cp_size=1, tp_size=world.size, timeout_s=arguments.timeout)
    ways = [replace(whole, shared_memory=False)] + [whole] * whole.shared_memory
    sums = [Communicator(way, Ledger()) for way in ways]
    profile = _measure(Communicator(mesh, Ledger()), model, arguments.profile_seconds, sums=sums)
    for comm in sums:
        comm.watch.uninstall()
    mesh.end()
    # Both ways to sum have the same groups.
    whole.end()
    return profile


def lone_profile(device: torch.device, model: ModelShape, seconds: float) -> HardwareProfile:
    """Measure a profile of this process alone."""
    return _measure(Alone(device), model, seconds, sums=[])


def _measure(comm: Communicator, model: ModelShape, seconds: float, *, sums: list[Communicator]) -> HardwareProfile:
    sizes = {"sizes": [model.attention(tp_size=comm.mesh.tp_size)], "matrices": Matrices.of(model)}
    with progress("profile") as step:
        return measure_profile(comm, dtype=model.dtype, seconds=seconds, sums=sums, report=step, **sizes)
