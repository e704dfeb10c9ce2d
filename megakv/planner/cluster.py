"""The planner: which mesh, method and fit serve a prompt on some machines best, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from megakv.attention.runahead import CHUNK_TOKENS
from megakv.base.errors import MegaKVError
from megakv.costmodel.chain import Chain
from megakv.costmodel.context_parallel import Workload, pass_bytes
from megakv.costmodel.decoding import decode_methods, ttit_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.memory import RankMemory
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.presets import Hardware
from megakv.costmodel.shape import ModelShape
from megakv.fairkv.profile import BudgetProfile
from megakv.offload.method import AUTO
from megakv.offload.times import moved_seconds, offloaded_step
from megakv.planner.choices import Choice, Demand, Fit, Mesh, Rejection
from megakv.planner.fitting import Fitting
from megakv.planner.planned_heads import fullest_share, place_heads
from megakv.runahead.chain_search import balanced_partition

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
    """Choices from the best on, and what was rejected."""

    choices: list[Choice]  # All that fit, and meet the objective where there is one.
    rejected: list[Rejection] = field(default_factory=list)
    evaluated: int = 0  # Predictions made.


class ClusterPlanner:
    """Plans for one model on one kind of machine.

    budgets: what KV heads keep where caches are compressed; None: all the same.
    progress: is told how many of how many meshes are done.
    """

    def __init__(
        self,
        hardware: Hardware,
        model: ModelShape,
        *,
        budgets: BudgetProfile | None = None,
        progress: Callable[[int, int], object] | None = None,
    ):
        fullest = None if budgets is None else partial(fullest_share, budgets)
        self._fitting = Fitting(hardware.spec, model, fullest)
        self._budgets = budgets
        self._hardware = hardware
        self._model = model
        self._progress = progress

    @property
    def room(self) -> int:
        return self._fitting.room

    def plan(self, demand: Demand) -> Plan:
        """Rank what can be run: what is fastest, or what serves most prompts per second within a longest time.

        Raises MegaKVError if nothing fits, or nothing is fast enough: says what is missing.
        """
        candidates, rejected = self._fitting.candidates(demand)
        if not candidates:
            raise MegaKVError(self._fitting.missing(demand))
        choices: list[Choice] = []
        bounds: list[Choice] = []
        for done, (mesh, fit, memory) in enumerate(candidates):
            rings = self._rings(demand, mesh, fit, memory)
            choices += rings
            if 1 < mesh.cp_size <= LONGEST_CHAIN and demand.context >= 2 * mesh.cp_size:
                ring = min(rings, key=lambda choice: choice.ttft_s)
                waits = ring.terms["exposed"] if ring.prefill != "single" else 0.0
                bounds.append(replace(ring, prefill="runahead", ttft_s=SLACK * (ring.ttft_s - waits)))
            if self._progress is not None:
                self._progress(done + 1, len(candidates))
        evaluated = len(choices)
        for number, bound in enumerate(sorted(bounds, key=lambda each: self._order(demand, each))):
            best = min(choices, key=lambda choice: self._order(demand, choice))
            reason = self._not_worth_trying(demand, bound, best, number)
            if reason is not None:
                rejected.append(Rejection(str(bound), reason))
                continue
            chain = self._chain(demand, bound)
            if isinstance(chain, Choice):
                choices.append(chain)
                evaluated += 1
            else:
                rejected.append(Rejection(str(bound), chain))
        return self._ranked(demand, choices, rejected, evaluated)

    def sent_bytes(self, demand: Demand, choice: Choice) -> dict[str, int]:
        """Bytes by operation that the rank of a choice which sends most puts on its links while a prompt is read."""
        cuts = None if choice.partition is None else (choice.partition,) * demand.batch
        return pass_bytes(
            self._fitting.shape(choice.fit),
            self._workload(demand, choice.mesh),
            choice.prefill,
            tp_size=choice.mesh.tp_size,
            partitions=cuts,
        )

    # What it costs

    def _profile(self, mesh: Mesh) -> HardwareProfile:
        return self._hardware.on_mesh(cp_size=mesh.cp_size, tp_size=mesh.tp_size)

    def _workload(self, demand: Demand, mesh: Mesh) -> Workload:
        return Workload((demand.context,) * demand.batch, (demand.cached,) * demand.batch, mesh.cp_size)

    def _rings(self, demand: Demand, mesh: Mesh, fit: Fit, memory: RankMemory) -> list[Choice]:
        """One choice for each ring method; on one context-parallel rank there is nothing to choose."""
        profile, model = self._profile(mesh), self._fitting.shape(fit)
        times = PrefillTimes(profile, model, self._workload(demand, mesh), tp_size=mesh.tp_size)
        decode, ttit_s = self._decoding(demand, mesh, fit, memory, profile)
        choices = []
        for method in ("pass_kv", "pass_q") if mesh.cp_size > 1 else ("single",):
            terms = times.terms(method)
            choice = Choice(mesh, fit, method, decode, memory, sum(terms.values()), ttit_s, terms)
            choices.append(self._placed(demand, self._moved(demand, choice, profile), profile))
        return choices

    def _not_worth_trying(self, demand: Demand, bound: Choice, best: Choice, tried: int) -> str | None:
        """Why a chain that takes `bound` at least is not predicted; None if it is."""
        if self._order(demand, bound) >= self._order(demand, best):
            limit = demand.slo_ttft_s
            than = f"takes {best.ttft_s:.3g} s" if limit is None else f"serves more within {limit:g} s"
            return f"a chain there takes {bound.ttft_s:.3g} s at least, and {best} {than}"
        if tried >= CHAINS:
            return f"not predicted: {CHAINS} chains whose bounds are below its {bound.ttft_s:.3g} s were tried"
        return None

    def _chain(self, demand: Demand, bound: Choice) -> Choice | str:
        """The runahead chain on a mesh, or why its fullest rank has no room."""
        mesh, fit = bound.mesh, bound.fit
        profile, model = self._profile(mesh), self._fitting.shape(fit)
        chunk = max(CHUNK_TOKENS, -(-demand.context // MESSAGES))
        # Layers are alike but for the first ones, in which the chain fills.
        few = replace(model, layers=model.layers[-LAYERS:])
        chain = Chain(profile, few, tp_size=mesh.tp_size, chunk_tokens=chunk)
        partition = balanced_partition(chain, demand.context, mesh.cp_size, cached=demand.cached)
        memory = self._fitting.memory(demand, mesh, fit, longest=max(partition))
        reason = self._fitting.too_large(demand, memory)
        if reason is not None:
            return reason
        workload = self._workload(demand, mesh)
        times = PrefillTimes(profile, model, workload, tp_size=mesh.tp_size, chunk_tokens=chunk)
        partitions = (partition,) * demand.batch
        terms = times.terms("runahead", partitions)
        choice = replace(
            bound, memory=memory, ttft_s=sum(terms.values()), terms=terms, partition=partition, chunk_tokens=chunk
        )
        return self._moved(demand, choice, profile)

    def _decoding(
        self, demand: Demand, mesh: Mesh, fit: Fit, memory: RankMemory, profile: HardwareProfile
    ) -> tuple[str, float]:
        held = max(1, round(demand.total * fit.kept_share))
        workload = Workload((1,) * demand.batch, (held,) * demand.batch, mesh.cp_size)
        model, link = self._fitting.shape(fit), profile.host_link

        def seconds(method: str) -> float:
            if fit.offload and link is not None:
                return offloaded_step(
                    profile,
                    link,
                    model,
                    workload,
                    method,
                    tp_size=mesh.tp_size,
                    sharers=_sharers(mesh, profile),
                    # What compression keeps is always sent.
                    plan=AUTO if fit.kept_share == 1 else "stream",
                    weights=fit.weights,
                    groups=fit.groups,
                    memory_bytes=memory.host - memory.host_weights if memory.disk else None,
                ).seconds
            return ttit_seconds(profile, model, workload, method, tp_size=mesh.tp_size)

        methods = decode_methods(mesh.cp_size, weights_here=not fit.weights)
        times = {method: seconds(method) for method in methods}
        best = min(times, key=lambda method: times[method])
        return best, times[best]

    def _placed(self, demand: Demand, choice: Choice, profile: HardwareProfile) -> Choice:
        """With KV heads that keep what the profile of budgets says, where that is what decoding goes by."""
        fit, latent = choice.fit, self._model.latent is not None
        if self._budgets is None or fit.kept_share == 1 or fit.offload or choice.mesh.cp_size > 1 or latent:
            return choice
        return place_heads(choice, demand, self._budgets, profile, self._fitting.shape(fit), self.room)

    def _moved(self, demand: Demand, choice: Choice, profile: HardwareProfile) -> Choice:
        """With the time that offloading takes at least: all cross the link, some go to disk as fast as it reads."""
        if not choice.fit.offload or profile.host_link is None:
            return choice
        tokens = -(-round(demand.total * choice.fit.kept_share) * demand.batch // choice.mesh.cp_size)
        tp_size, weights = choice.mesh.tp_size, choice.fit.weights
        moved_s = moved_seconds(profile.host_link, self._model, tokens, tp_size=tp_size, weights=weights)
        if choice.memory.disk and profile.disk_bandwidth is not None:
            disk_s = choice.memory.disk * _sharers(choice.mesh, profile) / profile.disk_bandwidth
            moved_s = max(moved_s, disk_s)
        if moved_s <= choice.ttft_s:
            return choice
        return replace(choice, ttft_s=moved_s, terms={**choice.terms, "host_link": moved_s - choice.ttft_s})

    # Which is best

    def _order(self, demand: Demand, choice: Choice) -> tuple[float, ...]:
        """Lower is better."""
        if demand.slo_ttft_s is None:
            fastest = choice.ttft_s, choice.mesh.ranks
            return fastest if demand.objective == "latency" else (-choice.tokens_per_s(demand), *fastest)
        late = choice.ttft_s > demand.slo_ttft_s
        return late, choice.ttft_s if late else -choice.tokens_per_s(demand), choice.ttit_s

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


def _sharers(mesh: Mesh, profile: HardwareProfile) -> int:
    return min(mesh.ranks * mesh.replicas, profile.devices_per_host or 1)
