"""Hardware profiles of the ranks and links that a benchmark runs on."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.stopwatch import Alone
from megakv.distributed.comm import Communicator
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import make_mesh
from megakv.launcher.ranks import progress
from megakv.planner.measure.kernels import Matrices
from megakv.planner.measure.profile import measure_profile

from .world import World


def measured_profile(
    world: World, model: ModelShape, arguments: argparse.Namespace, *, name: str | None = None, tp_size: int = 1
) -> HardwareProfile:
    """Measure one with a model's heads, as ``megakv profile`` does. Every rank must call it.

    Under a `name` it is kept in FILE.profiles, beside the results FILE if there are any, for who wants to predict anew.
    """
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
    if name is not None and world.rank == 0:
        keep(profile, arguments, name)
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
    shape, size = shape_of(model), world.size
    if idle or size < 2:
        if world.rank == 0:
            lone = lone_profile(world.device, shape, arguments.profile_seconds / min(size, 2))
            keep(lone, arguments, f"1-of-{size}")
        world.barrier()
    if size > 1:
        name = f"{size}" if rate is None else f"{size}-{rate}"
        measured_profile(world, shape, arguments, name=name, tp_size=tp_size)


def lone_profile(device: torch.device, model: ModelShape, seconds: float) -> HardwareProfile:
    """Measure a profile of this process alone."""
    return _measure(Alone(device), model, seconds, sums=[])


def profiles_of(results: Path) -> Path:
    """The folder in which a results file has its profiles."""
    return results.with_suffix(".profiles")


def keep(profile: HardwareProfile, arguments: argparse.Namespace, name: str) -> None:
    if arguments.json:
        profile.save(profiles_of(Path(arguments.json)) / f"{name}.json")


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Its sizes, in the type that it computes in."""
    return ModelShape.from_config(model.config, dtype=model.dtype)


def _measure(comm: Communicator, model: ModelShape, seconds: float, *, sums: list[Communicator]) -> HardwareProfile:
    sizes = {"sizes": [model.attention(tp_size=comm.mesh.tp_size)], "matrices": Matrices.of(model)}
    with progress("profile") as step:
        return measure_profile(comm, dtype=model.dtype, seconds=seconds, sums=sums, report=step, **sizes)
