"""Measuring a hardware profile, on the ranks that will use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import HardwareProfile, fingerprint
from megakv.costmodel.shape import AttentionShape
from megakv.costmodel.stopwatch import ROUNDS, Cases, Pool, lower_decile, slowest, timed
from megakv.distributed.comm import Communicator
from megakv.planner.measure.kernels import Kernel, Matrices, rank_curves
from megakv.planner.measure.links import UNIT_KEYS, UNIT_ROWS, exchange, overlap, ring_curves, sum_curve
from megakv.planner.measure.meeting import Meeting
from megakv.planner.measure.ragged import RaggedCases
from megakv.planner.measure.small_models import SmallModels
from megakv.tracking.machine import machine_info

DEFAULT_SIZES = tuple(AttentionShape(8, 2, dim, dim, torch.float32.itemsize) for dim in (64, 128))
DEFAULT_MATRICES = Matrices()
CALLS = 120
"""No call may take longer than this part of the whole time."""
PROBES = 5
PROBE_BYTES = 1 << 22
PROBE_ROWS, PROBE_KEYS = 256, 512


def measure_profile(
    comm: Communicator,
    *,
    dtype: torch.dtype,
    sizes: Sequence[AttentionShape] = DEFAULT_SIZES,
    matrices: Matrices = DEFAULT_MATRICES,
    seconds: float,
    sums: Sequence[Communicator] = (),
    report: Callable[[int], None] | None = None,
) -> HardwareProfile:
    """Measure this machine. Every rank must call it; all compute at the same time, as they will when serving.

    sizes, matrices: heads and weights to measure attention and matrix products with.
    seconds: how long it may take, about. More time makes steadier numbers and reaches larger blocks and messages.
    sums: further meshes whose tensor-parallel sums are to be known.
    report: called after each step with the number of all steps.
    """
    ring = comm.mesh.cp_size
    pool = Pool(dtype, comm.mesh.device)
    longest_s = seconds / CALLS
    cases, kernel = Cases(comm), Kernel(sizes[0], pool)
    flops, unit_s, bandwidth = _probe(comm, kernel)
    tables = [Kernel(size, pool).table(cases, flops=flops, longest_s=longest_s) for size in _all_sizes(sizes)]
    ragged = [RaggedCases(cases, pool, size, flops=flops, longest_s=longest_s) for size in sizes if not size.latent]
    curves = rank_curves(cases, pool, matrices, max(2, ring))
    late: list[Meeting | SmallModels] = []
    overlapped: Callable[[], dict[str, float]] | None = None
    if ring > 1:
        limits = {"bandwidth": bandwidth, "longest_s": longest_s}
        curves |= ring_curves(cases, comm, **limits)
        overlapped = overlap(cases, comm, partial(kernel.call, UNIT_ROWS, UNIT_KEYS), unit_s=unit_s, **limits)
        summed = [(each, sum_curve(cases, each, **limits)) for each in (comm, *sums) if each.mesh.tp_size > 1]
        late.append(Meeting(cases, comm, pool, sizes[0], matrices, summed))
    if pool.device.type == "cpu":
        late.append(SmallModels(cases, pool))
    steps = ROUNDS * len(cases)
    cases.run(seconds, None if report is None else lambda: report(steps))
    machine = fingerprint(comm, dtype)
    local = -(-machine.ranks // machine.hosts)
    # Whatever a rank that is alone sends to nobody takes no time.
    measured: dict[str, Any] = dict.fromkeys(("exchange", "all_to_all", "all_gather"), Curve.instant())
    measured |= dict.fromkeys(("exposed_transfer", "exposed_compute", "straggle"), 0.0)
    measured |= {name: curve() for name, curve in curves.items()}
    measured |= overlapped() if overlapped else {}
    profile = HardwareProfile(
        fingerprint=machine,
        ring_size=ring,
        attention=tuple(table() for table in tables),
        ragged=tuple(each.table() for each in ragged),
        **measured,
        step_overhead_s={},
        memory_bytes=_memory_bytes(comm, local),
        host_memory_bytes=min(comm.gather_objects(machine_info()["memory_bytes"])),
        devices_per_host=local,
    )
    # What is left over where all of this is used at once.
    return profile.model_copy(update={name: value for part in late for name, value in part.fields(profile).items()})


def _memory_bytes(comm: Communicator, local: int) -> int:
    """Memory of the rank with the least: of its accelerator; without one, its share of its host's."""
    total = int(get_accelerator().total_memory())
    return min(comm.gather_objects(total // local if comm.mesh.device.type == "cpu" else total))


def _all_sizes(sizes: Sequence[AttentionShape]) -> list[AttentionShape]:
    """Sizes, also with one head to a KV head, for few rows; and biased scores' kernel."""
    flash = dict.fromkeys(
        replace(size, kv_heads=size.heads // group, kernel="flash") for size in sizes for group in (1, size.group)
    )
    return [*flash, replace(sizes[0], kernel="math")]


def _probe(comm: Communicator, kernel: Kernel) -> tuple[float, float, float]:
    """Operations per second, seconds of an overlap unit and bytes per second of the exchange, roughly."""
    calls: list[Callable[[], object]] = [
        partial(kernel.call, PROBE_ROWS, PROBE_KEYS),
        partial(kernel.call, UNIT_ROWS, UNIT_KEYS),
    ]
    if comm.mesh.cp_size > 1:
        calls.append(exchange(comm, PROBE_BYTES))
    block_s, unit_s, *exchange_s = slowest(comm, [lower_decile([timed(call) for _ in range(PROBES)]) for call in calls])
    return kernel.operations(PROBE_ROWS * PROBE_KEYS) / block_s, unit_s, PROBE_BYTES / max(exchange_s, default=1.0)
