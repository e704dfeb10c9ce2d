"""Hardware profiles of the ranks and links that a benchmark runs on."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.measure.kernels import Matrices
from megakv.costmodel.measure.profile import measure_profile
from megakv.costmodel.measure.stopwatch import Alone
from megakv.costmodel.shape import ModelShape
from megakv.distributed.comm import Communicator
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import make_mesh
from megakv.launcher.ranks import Progress

from .world import World


def measured_profile(
    world: World, model: ModelShape, arguments: argparse.Namespace, *, tp_size: int = 1
) -> HardwareProfile:
    """Measure one with a model's heads, as ``megakv profile`` does. Every rank must call it."""
    mesh = make_mesh(cp_size=world.size // tp_size, tp_size=tp_size, timeout_s=arguments.timeout)
    sums = []
    if world.size > 1:
        # Sums over all ranks, as DeepSpeed's tensor parallelism forms them: by every way that there is.
        whole = make_mesh(cp_size=1, tp_size=world.size, timeout_s=arguments.timeout)
        ways = [replace(whole, shared_memory=False)] + [whole] * whole.shared_memory
        sums = [Communicator(way, Ledger()) for way in ways]
    profile = _measure(Communicator(mesh, Ledger()), model, arguments.profile_seconds, sums=sums)
    for comm in sums:
        comm.watch.uninstall()
    mesh.end()
    # Both ways to sum have the same groups.
    for comm in sums[:1]:
        comm.mesh.end()
    return profile


def keep_measured(
    world: World,
    model: PreTrainedModel,
    arguments: argparse.Namespace,
    *,
    rate: str | None = None,
    tp_size: int = 1,
    idle: bool = False,
) -> None:
    """Measure what rows are predicted from, if there is time to and a file beside which it is kept."""
    if not (arguments.profile_seconds and arguments.json):
        return
    shape = shape_of(model)
    if idle or world.size < 2:
        seconds = arguments.profile_seconds / (1 if world.size < 2 else 2)
        if world.rank == 0:
            lone = _measure(Alone(world.device), shape, seconds, sums=[])
            keep_profile(world, lone, arguments.json, f"1-of-{world.size}")
        world.barrier()
    if world.size > 1:
        profile = measured_profile(world, shape, arguments, tp_size=tp_size)
        keep_profile(world, profile, arguments.json, f"{world.size}" if rate is None else f"{world.size}-{rate}")


def keep_profile(world: World, profile: HardwareProfile, results: str | None, name: str) -> None:
    """Keep a profile in FILE.profiles, beside the results FILE if there are any, for who wants to predict anew."""
    if results is not None and world.rank == 0:
        profile.save(profiles_of(Path(results)) / f"{name}.json")


def profiles_of(results: Path) -> Path:
    """The folder in which a results file has its profiles."""
    return results.with_suffix(".profiles")


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Its sizes, in the type that it computes in."""
    return ModelShape.from_config(model.config, dtype=model.dtype)


def _measure(comm: Communicator, model: ModelShape, seconds: float, *, sums: list[Communicator]) -> HardwareProfile:
    progress = Progress("profile")
    profile = measure_profile(
        comm,
        dtype=model.dtype,
        sizes=[model.attention(tp_size=comm.mesh.tp_size)],
        matrices=Matrices.of(model),
        seconds=seconds,
        sums=sums,
        report=progress.step,
    )
    progress.close()
    return profile
