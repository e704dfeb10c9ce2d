"""Measuring a hardware profile, on the ranks that will use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from deepspeed.accelerator import get_accelerator

from megakv.comm import Communicator
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.hardware import HardwareProfile, fingerprint
from megakv.costmodel.kernel_times import (
    WEIGHT_WIDTH,
    KernelSizes,
    TableCells,
    combine_cells,
    copy_cells,
    fresh_copy_cells,
    matmul_cells,
    merge_cells,
)
from megakv.costmodel.link_times import (
    UNIT_KEYS,
    UNIT_ROWS,
    OverlapCells,
    all_gather_cells,
    all_to_all_cells,
    exchange,
    exchange_cells,
)
from megakv.costmodel.shape import AttentionShape
from megakv.costmodel.stopwatch import ROUNDS, Battery, Pool, Stopwatch, Times, lower_decile
from megakv.costmodel.trial import TrialLayer

DEFAULT_SECONDS = 60.0
DEFAULT_SIZES = (KernelSizes(64, 8, 4), KernelSizes(128, 8, 4))
CALLS = 120
"""No call may take longer than this part of the whole time."""
PROBES = 5
PROBE_BYTES = 1 << 22
PROBE_ROWS, PROBE_KEYS = 256, 512
OVERHEAD_METHODS = ("pass_kv", "pass_q", "all_gather", "replicated")


class Cells(Protocol):
    """A part of the profile."""

    def add(self, battery: Battery) -> None:
        """Put what is to be timed into a battery."""


def measure_profile(
    comm: Communicator,
    *,
    dtype: torch.dtype,
    sizes: Sequence[KernelSizes] = DEFAULT_SIZES,
    seconds: float = DEFAULT_SECONDS,
    report: Callable[[int], None] | None = None,
) -> HardwareProfile:
    """Measure this machine. Every rank must call it; all compute at the same time, as they will when serving.

    Parameters
    ----------
    comm : Communicator
        Its context-parallel degree must be 2 or more.
    dtype : torch.dtype
        Of Q, K, V and weights.
    sizes : sequence of KernelSizes
        Heads to measure attention with.
    seconds : float
        How long it may take, about. More time makes steadier numbers and reaches larger blocks and messages.
    report : callable, optional
        Called after each step with the number of all steps.

    Raises
    ------
    ValueError
        If there is no ring to measure.
    """
    ring = comm.mesh.cp_size
    if ring < 2:
        raise ValueError(f"a profile needs 2 or more context-parallel ranks, not {ring}: their exchange is part of it")
    watch = Stopwatch(comm)
    pool = Pool(dtype, comm.mesh.device)
    longest_s = seconds / CALLS
    probe = TableCells(sizes[0], pool, 1.0, longest_s)
    flops, unit_s, bandwidth = _probe(watch, probe)
    tables = [TableCells(size, pool, flops, longest_s) for size in _with_ungrouped(sizes)]
    matmul, copy, fresh = matmul_cells(pool), copy_cells(pool), fresh_copy_cells(pool)
    merge, combine = merge_cells(pool.device), combine_cells(pool.device, ring)
    step = exchange_cells(comm, bandwidth=bandwidth, longest_s=longest_s)
    scatter = all_to_all_cells(comm, bandwidth=bandwidth, longest_s=longest_s)
    gather = all_gather_cells(comm, bandwidth=bandwidth, longest_s=longest_s)
    overlap = OverlapCells(comm, probe, unit_s, bandwidth, longest_s)
    battery = Battery(watch)
    everything: list[Cells] = [*tables, matmul, copy, fresh, merge, combine, step, scatter, gather, overlap]
    for cells in everything:
        cells.add(battery)
    trials = _add_trials(battery, pool, sizes[0], dtype)
    steps = ROUNDS * len(battery)
    times = battery.run(seconds, None if report is None else lambda: report(steps))
    exposed_transfer, exposed_compute = overlap.exposed(times)
    machine = fingerprint(comm, dtype)
    local = -(-machine.ranks // machine.hosts)
    profile = HardwareProfile(
        fingerprint=machine,
        ring_size=ring,
        attention=tuple(table.table(times) for table in tables),
        matmul=matmul.curve(times, scale=1 / WEIGHT_WIDTH**2),
        copy_bytes=copy.curve(times),
        copy_fresh=fresh.curve(times),
        merge=merge.curve(times),
        combine=combine.curve(times),
        exchange=step.curve(times),
        exposed_transfer=exposed_transfer,
        exposed_compute=exposed_compute,
        straggle=overlap.straggle(times),
        all_to_all=scatter.curve(times),
        all_gather=gather.curve(times),
        step_overhead_s={},
        memory_bytes=_memory_bytes(comm, local),
        devices_per_host=local,
    )
    return profile.model_copy(update={"step_overhead_s": _overheads(profile, trials, times)})


def _memory_bytes(comm: Communicator, local: int) -> int:
    """Memory of the rank with the least: of its accelerator; without one, its share of its host's."""
    total = int(get_accelerator().total_memory())
    return min(comm.gather_objects(total // local if comm.mesh.device.type == "cpu" else total))


def _with_ungrouped(sizes: Sequence[KernelSizes]) -> list[KernelSizes]:
    """Sizes and what else is needed of them: one head to a KV head, for few rows, and the kernel of biased scores."""
    flash = dict.fromkeys(replace(size, group=group, kernel="flash") for size in sizes for group in (1, size.group))
    return [*flash, replace(sizes[0], kernel="math")]


def _probe(watch: Stopwatch, kernels: TableCells) -> tuple[float, float, float]:
    """Operations per second, seconds of an overlap unit and bytes per second of the exchange, roughly."""
    calls = (
        lambda: kernels.call(PROBE_ROWS, PROBE_KEYS, causal=False),
        lambda: kernels.call(UNIT_ROWS, UNIT_KEYS, causal=False),
        exchange(watch.comm, PROBE_BYTES),
    )
    block_s, unit_s, exchange_s = watch.slowest(
        [lower_decile([watch.once(call) for _ in range(PROBES)]) for call in calls]
    )
    sizes = kernels.sizes
    return 4 * sizes.heads * sizes.head_dim * PROBE_ROWS * PROBE_KEYS / block_s, unit_s, PROBE_BYTES / exchange_s


def _add_trials(
    battery: Battery, pool: Pool, size: KernelSizes, dtype: torch.dtype
) -> dict[str, tuple[AttentionShape, Workload]]:
    """The smallest pass of every method."""
    comm = battery.watch.comm
    ring = comm.mesh.cp_size
    shape = AttentionShape(size.heads, size.heads // size.group, size.head_dim, size.head_dim, dtype.itemsize)
    trials = {}
    for method in OVERHEAD_METHODS:
        workload = Workload((1 if method == "replicated" else 2 * ring,), (0,), ring)
        trial = TrialLayer(comm, shape, workload, pool=pool)
        battery.add("trial", method, call=lambda t=trial, m=method: t.run(m))  # type: ignore[misc]
        trials[method] = shape, workload
    return trials


def _overheads(
    profile: HardwareProfile, trials: dict[str, tuple[AttentionShape, Workload]], times: Times
) -> dict[str, float]:
    """What the smallest passes take beyond their prediction, per step."""
    found = {}
    for method, (shape, workload) in trials.items():
        predicted = LayerTimes(profile, shape, workload).predict(method).seconds
        found[method] = max(0.0, times["trial", method] - predicted) / workload.size
    return found
