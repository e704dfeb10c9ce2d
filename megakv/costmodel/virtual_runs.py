"""Runs that are simulated from end to end: a prompt that is read, and decoding over an offloaded cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megakv.attention.runahead import CHUNK_TOKENS
from megakv.costmodel.chain import Chain
from megakv.costmodel.chain_search import balanced_partition
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.memory import GIB, STAGED_LAYERS, rank_memory
from megakv.costmodel.offload import Placement
from megakv.costmodel.offload_pipeline import StepTimes, step_seconds
from megakv.costmodel.offload_time import (
    group_costs,
    layer_costs,
    layer_ways,
    layer_weight_bytes,
    placements_of,
    seen_tokens,
)
from megakv.costmodel.presets import Hardware
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.simulated_run import SimulatedRanks, simulated_report
from megakv.costmodel.simulation import Schedule
from megakv.costmodel.simulation_prefill import PrefillProgram
from megakv.costmodel.simulation_program import Program
from megakv.runahead.partition import Partition, check_partition, from_fractions
from megakv.tracking.report import RunReport

Lengths = tuple[tuple[int, ...], tuple[int, ...]]
"""New tokens of every sequence, and cached ones."""


class _Run:
    """What is simulated, on which machine: new tokens of every sequence, and cached ones."""

    def __init__(self, machine: Hardware, model: ModelShape, lengths: Lengths, *, cp_size: int, tp_size: int):
        self.machine = machine
        self.model = model
        self.workload = Workload(*lengths, cp_size)
        self.cp_size, self.tp_size = cp_size, tp_size
        self.profile: HardwareProfile = machine.on_mesh(cp_size=cp_size, tp_size=tp_size)

    def _ranks(self, tokens: Sequence[int]) -> SimulatedRanks:
        world = self.cp_size * self.tp_size
        workload, row = self.workload, self.model.attention(tp_size=self.tp_size).kv_row_bytes
        held = sum(workload.cached) / self.cp_size
        kept = [round((count + held) * row * len(self.model.layers)) for count in tokens]
        sequences = len(workload.new)
        memory = rank_memory(
            self.model,
            context=max(1, -(-workload.total // sequences)),
            batch=sequences,
            new=max(1, max(tokens) * self.cp_size // sequences),
            cp_size=self.cp_size,
            tp_size=self.tp_size,
        )
        hosts = [f"host{rank // self.machine.spec.devices_per_host}" for rank in range(world)]
        return SimulatedRanks(self.cp_size, self.tp_size, hosts, tokens, kept, [memory.total] * world)


class PrefillRun(_Run):
    """A prompt that is read; `fractions` are the ranks' shares in ``runahead``, which are balanced if left out."""

    def __init__(
        self,
        machine: Hardware,
        model: ModelShape,
        lengths: Lengths,
        method: str,
        *,
        cp_size: int,
        tp_size: int,
        fractions: Sequence[float] | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ):
        super().__init__(machine, model, lengths, cp_size=cp_size, tp_size=tp_size)
        self.method = method
        options: dict[str, Any] = {"tp_size": tp_size, "chunk_tokens": chunk_tokens}
        self._times = PrefillProgram(self.profile, model, self.workload, **options)
        if fractions is not None:
            check_partition(fractions, cp_size, setting="--partition")
        self._partitions: tuple[Partition, ...] | None = None
        if method == "runahead" and fractions is not None:
            self._partitions = tuple(from_fractions(fractions, new) for new in self.workload.new)
        elif method == "runahead":
            chain = Chain(self.profile, model, **options)
            self._partitions = tuple(
                balanced_partition(chain, new, cp_size, cached=cached) for new, cached in zip(*lengths, strict=True)
            )

    @property
    def closed_form_s(self) -> float:
        """TTFT by the closed forms, without disturbances."""
        return self._times.seconds(self.method, self._partitions)

    def program(self) -> Program:
        return self._times.build(self.method, self._partitions)

    def report(self, schedule: Schedule, **values: Any) -> RunReport:
        """A run that generates one token; `values` are its model, config and machine."""
        ranks = self._ranks(self._times.tokens(self.method, self._partitions))
        new_tokens = len(self.workload.new)
        return simulated_report(schedule, ranks, new_tokens=new_tokens, ttft_s=schedule.seconds, ttit_s=None, **values)


class DecodingRun(_Run):
    """Decoding steps over keys and values in host memory, each rank over its own link; all tokens are cached.

    weights_too: whether weights come over the same link.
    host_bytes: host memory of a rank; what has no room there lies on disk. None: there is room for all.
    Raises ValueError if the machine's link to host memory is not known, or its disk where that is needed.
    """

    def __init__(
        self,
        machine: Hardware,
        model: ModelShape,
        lengths: Lengths,
        *,
        cp_size: int,
        tp_size: int,
        steps: int,
        weights_too: bool,
        host_bytes: int | None = None,
    ):
        super().__init__(machine, model, lengths, cp_size=cp_size, tp_size=tp_size)
        link = self.profile.host_link
        if link is None:
            raise ValueError(
                "the hardware profile has no host_link: allowed: a known machine, or add it to the profile"
            )
        self._steps = steps
        held = tuple(new + cached for new, cached in zip(*lengths, strict=True))
        decoding = Workload((1,) * len(held), held, cp_size)
        layers = len(model.layers)
        methods = ("pass_q", "replicated") if cp_size > 1 else ("pass_q",)
        step_s = min(ttit_seconds(self.profile, model, decoding, name, tp_size=tp_size) for name in methods)
        sharers = min(cp_size * tp_size, self.profile.devices_per_host or 1)
        costs = layer_costs(self.profile, link, model, tp_size=tp_size, device_s=step_s / layers, sharers=sharers)
        tokens = -(-(seen_tokens(model, Workload(*lengths, cp_size)) if host_bytes is None else sum(held)) // cp_size)
        placements: list[tuple[Placement, ...]] = [()]
        if host_bytes is not None:
            placements = placements_of(model, tokens, host_bytes / layers, tp_size=tp_size)
            if self.profile.disk_bandwidth is None:
                placements = [each for each in placements if not any(placement.on_disk for placement in each)]
            if not placements:
                raise ValueError(
                    f"{host_bytes / GIB:.3g} GiB of host memory do not hold what is cached, and the profile has "
                    "no disk_bandwidth for the rest: allowed: more of --host-gb, or add disk_bandwidth to the profile"
                )
        ways = (way for each in placements for way in layer_ways(costs, group_costs(costs, tokens, each)))
        self._times, split = min(ways, key=lambda way: step_seconds([way[0]], layers))
        row = model.attention(tp_size=tp_size).kv_row_bytes
        inputs = model.hidden * model.element_bytes
        weights = layer_weight_bytes(model, tp_size=tp_size) * weights_too
        self._sent = row * split.streamed + inputs * split.recomputed, weights
        self._weights_s = link.at(weights)

    @property
    def closed_form_s(self) -> float:
        """TTIT without disturbances; weights sent before the next layer's keys and values."""
        times = replace(self._times, sent_s=self._times.sent_s + self._weights_s)
        return step_seconds([times], len(self.model.layers))

    def program(self) -> Program:
        return offload_program(
            self._times,
            len(self.model.layers),
            steps=self._steps,
            ranks=self.cp_size * self.tp_size,
            weights_s=self._weights_s,
            sent=self._sent,
        )

    def report(self, schedule: Schedule, **values: Any) -> RunReport:
        """A run whose prompt was read before: all steps are decoding."""
        even = -(-self.workload.total_new // self.cp_size)
        ranks = self._ranks([even] * (self.cp_size * self.tp_size))
        steps_s = schedule.seconds / self._steps
        new_tokens = self._steps * len(self.workload.new)
        return simulated_report(schedule, ranks, new_tokens=new_tokens, ttft_s=None, ttit_s=steps_s, **values)


VirtualRun = PrefillRun | DecodingRun


def offload_program(
    times: StepTimes,
    layers: int,
    *,
    steps: int,
    ranks: int = 1,
    weights_s: float = 0.0,
    sent: tuple[int, int] = (0, 0),
) -> Program:
    """Steps of decoding, each rank for itself, with keys and values behind one host link (KVPR).

    `times` are one layer's, `weights_s` those of its weights, and `sent` the bytes of both on the link. A layer's
    transfers begin when one of two buffers is free. Its recomputation waits for the activations, its attention for
    everything. Weights come behind the layer's keys and values, and what follows attention waits for them.
    """
    program = Program(ranks)
    for rank in range(ranks):
        _add_rank(program, rank, times, layers, steps, weights_s, sent)
    return program


def _add_rank(
    program: Program, rank: int, times: StepTimes, layers: int, steps: int, weights_s: float, sent: tuple[int, int]
) -> None:
    cache_bytes, weight_bytes = sent
    first_bytes, landed_bytes = (
        round(cache_bytes * seconds / times.sent_s) if times.sent_s else 0
        for seconds in (times.first_s, times.landed_s)
    )
    attended: list[int] = []
    busy: list[int] = []
    carried: list[int] = []
    for _ in range(steps):
        for layer in range(layers):
            free = attended[-STAGED_LAYERS:][: len(attended) >= STAGED_LAYERS]
            first = program.load("activations", rank, times.first_s, [*carried, *free], first_bytes, layer=layer)
            others, nbytes = times.landed_s - times.first_s, landed_bytes - first_bytes
            landed = program.load("activations", rank, others, [first], nbytes, layer=layer)
            rest = times.sent_s - times.landed_s
            there = program.load("kv", rank, rest, [landed], cache_bytes - landed_bytes, layer=layer)
            carried = [there]
            if weights_s:
                carried = [program.load("weights", rank, weights_s, carried, weight_bytes, layer=layer)]
            # All but the last activations are recomputed as they land.
            early = program.compute("recompute", rank, times.recompute_s - times.last_s, [*busy, first], layer=layer)
            queries = program.compute("recompute", rank, times.last_s, [early, landed], layer=layer)
            parts = [program.compute("attention", rank, times.attend_s, [queries, there], layer=layer)]
            if times.host_s:
                parts.append(program.attend_on_host(rank, times.host_s, [queries], layer=layer))
            attended.append(program.compute("attention", rank, 0.0, parts, layer=layer))
            needed = [attended[-1], *(carried if weights_s else [])]
            busy = [program.compute("dense", rank, times.layer_s, needed, layer=layer)]
        busy = [program.compute("dense", rank, times.outside_s, busy)]
