"""The planner: which mesh, method and fit serve a prompt on some machines best, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from megakv.attention.runahead import CHUNK_TOKENS
from megakv.costmodel.chain import Chain
from megakv.costmodel.chain_search import balanced_partition
from megakv.costmodel.choices import MOST_GPUS, Choice, Demand, Fit, Mesh, Rejection, meshes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.memory import RankMemory, rank_memory
from megakv.costmodel.offload_time import moved_seconds, offloaded_ttit
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.presets import Hardware
from megakv.costmodel.shape import ModelShape
from megakv.errors import MegaKVError

RESERVE = 0.05
"""What part of an accelerator's memory is left to allocator and libraries."""
BUDGETS = (0.5, 0.25, 0.125)
"""Shares of keys and values that compression is offered with."""
MESSAGES = 128
"""Of a chain, about so many go down each link in a layer."""
LONGEST_CHAIN = 64
LAYERS = 4
"""Of a chain whose partition is looked for: more do not change which one is best."""
CHAINS = 3
"""So many meshes at most are tried with a chain: the promising ones."""
SLACK = 0.97
"""A chain may be this much faster than all of a ring's work: its kernels are of other shapes."""


@dataclass(frozen=True)
class Plan:
    """Choices from the best on, and what was rejected.

    Parameters
    ----------
    choices : list of Choice
        All that fit, and meet the objective where there is one.
    rejected : list of Rejection
    evaluated : int
        Predictions made.
    """

    choices: list[Choice]
    rejected: list[Rejection] = field(default_factory=list)
    evaluated: int = 0


class ClusterPlanner:
    """Plans for one model on one kind of machine.

    Parameters
    ----------
    hardware : Hardware
    model : ModelShape
    progress : callable, optional
        Told after every mesh how many of how many are done.
    """

    def __init__(self, hardware: Hardware, model: ModelShape, *, progress: Callable[[int, int], object] | None = None):
        self._hardware = hardware
        self._model = model
        self._progress = progress

    @property
    def room(self) -> int:
        """Bytes of one accelerator that may be used."""
        return int(self._hardware.spec.memory_bytes * (1 - RESERVE))

    def plan(self, demand: Demand) -> Plan:
        """Rank what can be run.

        With a longest time to first token, what serves most prompts per second within it comes first; without one, what
        is fastest.

        Raises
        ------
        MegaKVError
            If nothing fits, or nothing is fast enough: says what is missing.
        """
        fitting, rejected = self._fitting(demand)
        if not fitting:
            raise MegaKVError(self._missing(demand))
        choices: list[Choice] = []
        bounds: list[tuple[Choice, float]] = []
        for done, (mesh, fit, memory) in enumerate(fitting):
            rings = self._rings(demand, mesh, fit, memory)
            choices += rings
            if 1 < mesh.cp_size <= LONGEST_CHAIN and demand.context >= 2 * mesh.cp_size:
                ring = min(rings, key=lambda choice: choice.ttft_s)
                waits = ring.terms["exposed"] if ring.prefill != "single" else 0.0
                bounds.append((replace(ring, prefill="runahead", ttft_s=SLACK * (ring.ttft_s - waits)), waits))
            if self._progress is not None:
                self._progress(done + 1, len(fitting))
        evaluated = len(choices)
        for number, (bound, _) in enumerate(sorted(bounds, key=lambda pair: self._order(demand, pair[0]))):
            best = min(choices, key=lambda choice: self._order(demand, choice))
            if number >= CHAINS or self._order(demand, bound) >= self._order(demand, best):
                rejected.append(Rejection(str(bound), f"no chain there is faster than {bound.ttft_s:.3g} s"))
                continue
            choices += self._chain(demand, bound)
            evaluated += 1
        return self._ranked(demand, choices, rejected, evaluated)

    # What fits

    def _memory(self, demand: Demand, mesh: Mesh, fit: Fit, *, longest: int | None = None) -> RankMemory:
        new = -(-demand.context // mesh.cp_size) if longest is None else longest
        return rank_memory(
            self._shape(fit),
            context=max(demand.total, new * mesh.cp_size + demand.cached),
            batch=demand.batch,
            new=new * mesh.cp_size,
            cp_size=mesh.cp_size,
            tp_size=mesh.tp_size,
            kept_share=fit.kept_share,
            offloaded_share=float(fit.offload),
        )

    def _shape(self, fit: Fit) -> ModelShape:
        return self._fp8_model if fit.fp8 else self._model

    @cached_property
    def _fp8_model(self) -> ModelShape:
        return self._model.with_fp8_feed_forward()

    def _fitting(self, demand: Demand) -> tuple[list[tuple[Mesh, Fit, RankMemory]], list[Rejection]]:
        """Meshes with the ways to fit that are worth predicting: nothing is compressed where anything else helps."""
        fp8 = [Fit(fp8=True)] if self._hardware.spec.fp8_flops is not None else []
        found, rejected = self._those(demand, [Fit(), *fp8, Fit(offload=True)])
        if found:
            return found, rejected
        budgets = [Fit(kept_share=share) for share in BUDGETS]
        found, more = self._those(demand, [*budgets, *(replace(fit, fp8=True) for fit in budgets for _ in fp8)])
        return found, rejected + more

    def _those(self, demand: Demand, fits: list[Fit]) -> tuple[list[tuple[Mesh, Fit, RankMemory]], list[Rejection]]:
        found: list[tuple[Mesh, Fit, RankMemory]] = []
        rejected: list[Rejection] = []
        for mesh in meshes(self._model, demand):
            # Tried in this order, and the cache is touched only where less does not do.
            cached_fits = False
            for fit in fits:
                if cached_fits and not fit.fp8:
                    continue
                memory = self._memory(demand, mesh, fit)
                fits_room = memory.total <= self.room
                if not fits_room:
                    rejected.append(Rejection(f"{mesh} {fit}".strip(), self._too_large(memory)))
                elif fit.fp8 and not demand.fp8 or fit.kept_share < 1 and not demand.lossy:
                    rejected.append(Rejection(f"{mesh} {fit}", "not exact: --allow-lossy admits it"))
                else:
                    found.append((mesh, fit, memory))
                cached_fits |= fits_room and not fit.fp8
        return found, rejected

    def _too_large(self, memory: RankMemory) -> str:
        parts = ", ".join(f"{name} {getattr(memory, name) / 1e9:.1f}" for name in ("weights", "cache", "working"))
        return f"needs {memory.total / 1e9:.1f} GB a rank ({parts}), there are {self.room / 1e9:.1f}"

    def _missing(self, demand: Demand) -> str:
        """What would do where nothing does."""
        closest = min(
            (self._memory(demand, mesh, Fit()) for mesh in meshes(self._model, demand)), key=lambda each: each.total
        )
        text = (
            f"no plan fits {demand.gpus} x {self._hardware.spec.memory_bytes / 1e9:.0f} GB "
            f"({self._hardware.spec.name}): the smallest {self._too_large(closest)}"
        )
        more = demand.gpus
        while more < MOST_GPUS:
            more = min(2 * more, MOST_GPUS)
            larger = replace(demand, gpus=more)
            enough = [
                mesh for mesh in meshes(self._model, larger) if self._memory(larger, mesh, Fit()).total <= self.room
            ]
            if enough:
                least = min(enough, key=lambda mesh: mesh.ranks)
                text += f"; {least.ranks} ranks would do ({least})"
                break
        else:
            text += "; more ranks would not help: one rank's share of the weights is too large"
        if not demand.lossy:
            admitted = replace(demand, lossy=True)
            found, _ = self._fitting(admitted)
            if found:
                mesh, fit, _ = found[0]
                text += f"; with --allow-lossy: {mesh}, {fit}"
        return text

    # What it costs

    def _profile(self, mesh: Mesh) -> HardwareProfile:
        return self._hardware.on_mesh(cp_size=mesh.cp_size, tp_size=mesh.tp_size)

    def _workload(self, demand: Demand, mesh: Mesh) -> Workload:
        return Workload((demand.context,) * demand.batch, (demand.cached,) * demand.batch, mesh.cp_size)

    def _rings(self, demand: Demand, mesh: Mesh, fit: Fit, memory: RankMemory) -> list[Choice]:
        """One choice for each ring method; on one context-parallel rank there is nothing to choose."""
        profile, model = self._profile(mesh), self._shape(fit)
        times = PrefillTimes(profile, model, self._workload(demand, mesh), tp_size=mesh.tp_size)
        decode, ttit_s = self._decoding(demand, mesh, fit, profile)
        choices = []
        for method in ("pass_kv", "pass_q") if mesh.cp_size > 1 else ("single",):
            ttft_s = max(times.seconds(method), self._moved(demand, mesh, fit, profile))
            terms = times.terms(method)
            choices.append(Choice(mesh, fit, method, decode, memory, ttft_s, ttit_s, terms))
        return choices

    def _chain(self, demand: Demand, bound: Choice) -> list[Choice]:
        """The runahead chain on a mesh, if its fullest rank has room."""
        mesh, fit = bound.mesh, bound.fit
        profile, model = self._profile(mesh), self._shape(fit)
        chunk = max(CHUNK_TOKENS, -(-demand.context // MESSAGES))
        # Layers are alike but for the first ones, in which the chain fills.
        few = replace(model, layers=model.layers[-LAYERS:])
        chain = Chain(profile, few, tp_size=mesh.tp_size, chunk_tokens=chunk)
        partition = balanced_partition(chain, demand.context, mesh.cp_size, cached=demand.cached)
        memory = self._memory(demand, mesh, fit, longest=max(partition))
        if memory.total > self.room:
            return []
        workload = self._workload(demand, mesh)
        times = PrefillTimes(profile, model, workload, tp_size=mesh.tp_size, chunk_tokens=chunk)
        partitions = (partition,) * demand.batch
        ttft_s = max(times.seconds("runahead", partitions), self._moved(demand, mesh, fit, profile))
        terms = times.terms("runahead", partitions)
        return [replace(bound, memory=memory, ttft_s=ttft_s, terms=terms, partition=partition, chunk_tokens=chunk)]

    def _decoding(self, demand: Demand, mesh: Mesh, fit: Fit, profile: HardwareProfile) -> tuple[str, float]:
        held = max(1, round(demand.total * fit.kept_share))
        workload = Workload((1,) * demand.batch, (held,) * demand.batch, mesh.cp_size)
        model, link = self._shape(fit), profile.host_link
        methods = ("pass_q", "replicated") if mesh.cp_size > 1 else ("pass_q",)

        def seconds(method: str) -> float:
            if fit.offload and link is not None:
                return offloaded_ttit(profile, link, model, workload, method, tp_size=mesh.tp_size)
            return ttit_seconds(profile, model, workload, method, tp_size=mesh.tp_size)

        times = {method: seconds(method) for method in methods}
        best = min(times, key=lambda method: times[method])
        return best, times[best]

    def _moved(self, demand: Demand, mesh: Mesh, fit: Fit, profile: HardwareProfile) -> float:
        """What offloading at least takes: every key and value crosses the link."""
        if not fit.offload or profile.host_link is None:
            return 0.0
        tokens = -(-demand.total * demand.batch // mesh.cp_size)
        return moved_seconds(profile.host_link, self._model, tokens, tp_size=mesh.tp_size)

    # Which is best

    def _order(self, demand: Demand, choice: Choice) -> tuple[float, ...]:
        """Lower is better."""
        if demand.slo_ttft_s is None:
            return choice.ttft_s, choice.mesh.ranks
        late = choice.ttft_s > demand.slo_ttft_s
        return late, choice.ttft_s if late else -choice.prompt_tokens_per_s(demand), choice.ttit_s

    def _ranked(self, demand: Demand, choices: list[Choice], rejected: list[Rejection], evaluated: int) -> Plan:
        choices = sorted(choices, key=lambda choice: self._order(demand, choice))
        limit = demand.slo_ttft_s if demand.slo_ttft_s is not None else math.inf
        late = [choice for choice in choices if choice.ttft_s > limit]
        if len(late) == len(choices):
            fastest = late[0]
            raise MegaKVError(
                f"no plan on {demand.gpus} accelerators has a first token within --slo-ttft {limit:g} s: the fastest, "
                f"{fastest}, takes {fastest.ttft_s:.3g} s; allowed: a longer time, or more accelerators"
            )
        why = "{:.3g} s to the first token, more than the {:g} s allowed"
        rejected = [*rejected, *(Rejection(str(choice), why.format(choice.ttft_s, limit)) for choice in late)]
        return Plan([choice for choice in choices if choice.ttft_s <= limit], rejected, evaluated)
