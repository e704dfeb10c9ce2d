"""Hardware profiles of the ranks and links that a benchmark runs on."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.measure.kernels import KernelSizes, Matrices
from megakv.costmodel.measure.profile import measure_profile
from megakv.costmodel.measure.stopwatch import Alone
from megakv.costmodel.shape import ModelShape
from megakv.distributed.comm import Communicator
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import make_mesh
from megakv.launcher.ranks import Progress

from .world import World

LONE = "1-of-"
"""Begins the name of the profile of one rank while the others, of so many in all, stand idle."""


@contextlib.contextmanager
def measured_profile(
    world: World, model: ModelShape, *, seconds: float, timeout_s: float, tp_size: int = 1
) -> Iterator[str]:
    """Measure one with a model's heads, as ``megakv profile`` does. Every rank must call it."""
    mesh = make_mesh(cp_size=world.size // tp_size, tp_size=tp_size, timeout_s=timeout_s)
    sums = _whole_world(world, timeout_s)
    profile = _measure(Communicator(mesh, Ledger()), model, seconds, sums=sums)
    for comm in sums:
        comm.watch.uninstall()
    mesh.end()
    # Both ways to sum have the same groups.
    for comm in sums[:1]:
        comm.mesh.end()
    with tempfile.TemporaryDirectory(prefix="megakv-profile-") as folder:
        path = Path(folder) / "profile.json"
        profile.save(path)
        yield str(path)


def lone_profile(world: World, model: ModelShape, *, seconds: float) -> HardwareProfile:
    """Measure one rank while all others stand idle. Every rank must call it."""
    profile = None
    if world.rank == 0:
        profile = _measure(Alone(world.device), model, seconds, sums=[])
    found = world.gather(profile)[0]
    assert found is not None
    return found


def keep_profile(world: World, profile: HardwareProfile, results: str | None, name: str) -> None:
    """Keep a profile in FILE.profiles, beside the results FILE if there are any, for who wants to predict anew."""
    if results is None or world.rank != 0:
        return
    folder = profiles_of(Path(results))
    folder.mkdir(parents=True, exist_ok=True)
    profile.save(folder / f"{name}.json")


def profiles_of(results: Path) -> Path:
    """The folder in which a results file has its profiles."""
    return results.with_suffix(".profiles")


def _whole_world(world: World, timeout_s: float) -> list[Communicator]:
    """Sums over all ranks, as DeepSpeed's tensor parallelism forms them: by every way that there is."""
    if world.size < 2:
        return []
    mesh = make_mesh(cp_size=1, tp_size=world.size, timeout_s=timeout_s)
    ways = [replace(mesh, shared_memory=False)] + [mesh] * mesh.shared_memory
    return [Communicator(way, Ledger()) for way in ways]


def _measure(comm: Communicator, model: ModelShape, seconds: float, *, sums: list[Communicator]) -> HardwareProfile:
    shape = model.attention(tp_size=comm.mesh.tp_size)
    progress = Progress("profile")
    profile = measure_profile(
        comm,
        dtype=model.dtype,
        sizes=[KernelSizes.of(shape)],
        matrices=Matrices.of(model),
        seconds=seconds,
        sums=sums,
        report=progress.step,
    )
    progress.close()
    return profile
