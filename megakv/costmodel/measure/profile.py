"""Measuring a hardware profile, on the ranks that will use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from deepspeed.accelerator import get_accelerator

from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import HardwareProfile, fingerprint
from megakv.costmodel.measure.kernels import Matrices, TableCases, rank_curves
from megakv.costmodel.measure.links import UNIT_KEYS, UNIT_ROWS, OverlapCases, exchange, ring_curves, sum_cases
from megakv.costmodel.measure.meeting import MeetingCases
from megakv.costmodel.measure.small_models import SmallModelCases
from megakv.costmodel.measure.stopwatch import ROUNDS, Cases, Pool, Stopwatch, lower_decile
from megakv.costmodel.shape import AttentionShape
from megakv.distributed.comm import Communicator
from megakv.tracking.machine import machine_info

DEFAULT_SECONDS = 60.0
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
    seconds: float = DEFAULT_SECONDS,
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
    watch = Stopwatch(comm)
    pool = Pool(dtype, comm.mesh.device)
    longest_s = seconds / CALLS
    probe = TableCases(sizes[0], pool, 1.0, longest_s)
    flops, unit_s, bandwidth = _probe(watch, probe)
    tables = [TableCases(size, pool, flops, longest_s) for size in _all_tables(sizes, pool.device)]
    curves = rank_curves(pool, matrices, max(2, ring))
    summed = [each for each in (comm, *sums) if each.mesh.tp_size > 1]
    sum_curves = [sum_cases(each, bandwidth=bandwidth, longest_s=longest_s) for each in summed]
    overlap = meeting = None
    if ring > 1:
        curves |= ring_curves(comm, bandwidth=bandwidth, longest_s=longest_s)
        overlap = OverlapCases(comm, probe, unit_s, bandwidth, longest_s)
        meeting = MeetingCases(comm, pool, sizes[0], summed, matrices)
    small = SmallModelCases(pool) if pool.device.type == "cpu" else None
    cases = Cases(watch)
    for part in (*tables, *curves.values(), overlap, *(sum_curves if meeting else ()), meeting, small):
        if part is not None:
            part.add(cases)
    steps = ROUNDS * len(cases)
    times = cases.run(seconds, None if report is None else lambda: report(steps))
    machine = fingerprint(comm, dtype)
    local = -(-machine.ranks // machine.hosts)
    # Whatever a rank that is alone sends to nobody takes no time.
    measured: dict[str, Any] = dict.fromkeys(("exchange", "all_to_all", "all_gather"), Curve.instant())
    measured |= dict.fromkeys(("exposed_transfer", "exposed_compute", "straggle"), 0.0)
    measured |= {name: curve.curve(times) for name, curve in curves.items()}
    measured |= overlap.fields(times) if overlap else {}
    profile = HardwareProfile(
        fingerprint=machine,
        ring_size=ring,
        attention=tuple(table.table(times) for table in tables),
        **measured,
        sums=meeting.sum_times(times, sum_curves) if meeting else (),
        step_overhead_s={},
        memory_bytes=_memory_bytes(comm, local),
        host_memory_bytes=min(comm.gather_objects(machine_info()["memory_bytes"])),
        devices_per_host=local,
    )
    # What is left over where all of this is used at once.
    rest = {**(meeting.fields(profile, times) if meeting else {}), **(small.fields(profile, times) if small else {})}
    return profile.model_copy(update=rest)


def _memory_bytes(comm: Communicator, local: int) -> int:
    """Memory of the rank with the least: of its accelerator; without one, its share of its host's."""
    total = int(get_accelerator().total_memory())
    return min(comm.gather_objects(total // local if comm.mesh.device.type == "cpu" else total))


def _all_tables(sizes: Sequence[AttentionShape], device: torch.device) -> list[AttentionShape]:
    """Sizes, also with one head to a KV head, for few rows; biased scores' kernel, and transformers' for decoding."""
    flash = dict.fromkeys(
        replace(size, kv_heads=size.heads // group, kernel="flash") for size in sizes for group in (1, size.group)
    )
    others: tuple[Literal["math", "sdpa"], ...] = ("math", "sdpa") if device.type == "cpu" else ("math",)
    return [*flash, *(replace(sizes[0], kernel=kernel) for kernel in others)]


def _probe(watch: Stopwatch, kernels: TableCases) -> tuple[float, float, float]:
    """Operations per second, seconds of an overlap unit and bytes per second of the exchange, roughly."""
    calls: list[Callable[[], object]] = [
        lambda: kernels.call(PROBE_ROWS, PROBE_KEYS, causal=False),
        lambda: kernels.call(UNIT_ROWS, UNIT_KEYS, causal=False),
    ]
    if watch.comm.mesh.cp_size > 1:
        calls.append(exchange(watch.comm, PROBE_BYTES))
    block_s, unit_s, *exchange_s = watch.slowest(
        [lower_decile([watch.once(call) for _ in range(PROBES)]) for call in calls]
    )
    sizes = kernels.sizes
    return (
        4 * sizes.heads * sizes.head_dim * PROBE_ROWS * PROBE_KEYS / block_s,
        unit_s,
        PROBE_BYTES / max(exchange_s, default=1.0),
    )
