"""What fits: the meshes of some accelerators on which a model has room, the ways to make it, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property

from megakv.costmodel.machine_spec import MachineSpec
from megakv.costmodel.memory import RESERVE, RankMemory, rank_memory
from megakv.costmodel.shape import ModelShape
from megakv.offload.times import group_counts
from megakv.planner.choices import MOST_GPUS, Demand, Fit, Mesh, Rejection, meshes

HOST_RESERVE = 0.1
"""What part of a host's memory is left to its system and to the processes themselves."""
BUDGETS = (0.5, 0.25, 0.125)
"""Shares of keys and values that compression is offered with."""
GB = 1e9


class Fitting:
    """Memory of one model on one kind of machine.

    fullest: by tensor-parallel ranks, what compression keeps on the fullest of them over their mean; None: as much.
    """

    def __init__(self, spec: MachineSpec, model: ModelShape, fullest: Callable[[int], float] | None = None):
        self._spec, self._model, self._fullest = spec, model, fullest
        self.room = int(spec.memory_bytes * (1 - RESERVE))

    def host_room(self, gpus: int) -> int | None:
        """Bytes of host memory that each of so many accelerators may use; None: not known."""
        share = self._spec.host_share(gpus)
        return None if share is None else int(share * (1 - HOST_RESERVE))

    def shape(self, fit: Fit) -> ModelShape:
        return self._fp8_model if fit.fp8 else self._model

    def memory(self, demand: Demand, mesh: Mesh, fit: Fit, *, longest: int | None = None) -> RankMemory:
        """Memory of the fullest rank; `longest` new tokens of a sequence are on it, or all ranks have as many."""
        new = -(-demand.context // mesh.cp_size) if longest is None else longest
        memory = rank_memory(
            self.shape(fit),
            context=max(demand.longest, new * mesh.cp_size + demand.cached + demand.new_tokens),
            batch=demand.batch,
            new=new * mesh.cp_size,
            cp_size=mesh.cp_size,
            tp_size=mesh.tp_size,
            kept_share=fit.kept_share,
            offloaded=fit.offload,
            weights_away=fit.weights,
            groups=fit.groups,
        )
        if not fit.offload:
            more = 1.0 if fit.kept_share == 1 or self._fullest is None else self._fullest(mesh.tp_size)
            return replace(memory, cache=round(memory.cache * more))
        room = self.host_room(demand.gpus)
        # Without an accelerator there is no room in memory: what it works with and what it offloads are in the same.
        if room is None or self._spec.disk_bandwidth is None or self._spec.accelerator == "cpu":
            return memory
        if memory.host_weights >= room:
            return memory
        return replace(memory, host=min(memory.host, room), disk=max(0, memory.host - room))

    def candidates(self, demand: Demand) -> tuple[list[tuple[Mesh, Fit, RankMemory]], list[Rejection]]:
        """Meshes with the ways to fit that are worth predicting: nothing is compressed where anything else helps.

        Where it is known what heads keep, compression comes before offloading.
        """
        fp8 = [Fit(fp8=True)] if self._spec.fp8_flops is not None and self._model.packed is None else []
        budgets = [Fit(kept_share=share) for share in BUDGETS]
        early = [] if self._fullest is None else budgets
        found, rejected = self._those(demand, [Fit(), *fp8, *early, Fit(offload=True)])
        if not found or demand.objective == "throughput":
            columns, more = self._columns(demand, {mesh for mesh, _, _ in found})
            found, rejected = found + columns, rejected + more
        if found:
            return found, rejected
        found, more = self._those(demand, [*budgets, *(replace(fit, fp8=True) for fit in budgets for _ in fp8)])
        if not found:
            rejected += more
            found, more = self._those(demand, [replace(fit, offload=True) for fit in budgets])
        return found, rejected + more

    def missing(self, demand: Demand) -> str:
        """What would do where nothing fits: memory of a rank, more ranks, host memory, or what is not exact."""
        tried = list(meshes(self._model, demand))
        closest = min((self.memory(demand, mesh, Fit()) for mesh in tried), key=lambda each: each.total)
        text = (
            f"no plan fits {demand.gpus} x {self._spec.memory_bytes / GB:.0f} GB ({self._spec.name}): the smallest "
            f"{self._too_large(closest)}; {self._enough(demand)}"
        )
        if offloaded := self._least_host(demand, tried):
            text += f"; with keys and values off the accelerator {offloaded}"
        if not demand.lossy:
            found, _ = self.candidates(replace(demand, lossy=True))
            if found:
                mesh, fit, _ = found[0]
                text += f"; with --allow-lossy: {mesh}, {fit}"
        return text

    def too_large(self, demand: Demand, memory: RankMemory) -> str | None:
        """Why a rank has no room, with the numbers; None where it has."""
        if memory.total > self.room:
            return self._too_large(memory)
        spec = self._spec
        share, room = min(spec.devices_per_host, demand.gpus), self.host_room(demand.gpus)
        if spec.disk_bytes is not None and memory.disk > (disk := spec.disk_bytes // share):
            return (
                f"needs {memory.disk / GB:.1f} GB on disk a rank beside {memory.host / GB:.1f} GB of host memory, "
                f"there are {disk / GB:.1f}"
            )
        # Without an accelerator both are the same memory.
        held = memory.total if spec.accelerator == "cpu" else 0
        if room is None or not memory.host or memory.host + held <= room:
            return None
        beside = f" beside {held / GB:.1f} GB in use" if held else ""
        return (
            f"needs {memory.host / GB:.1f} GB of host memory a rank{beside}, there are {room / GB:.1f} "
            f"({(spec.host_memory_bytes or 0) / GB:.0f} GB a host, {share} of its accelerators share them)"
        )

    @cached_property
    def _fp8_model(self) -> ModelShape:
        return self._model.with_fp8_feed_forward()

    def _those(self, demand: Demand, fits: Sequence[Fit]) -> tuple[list[tuple[Mesh, Fit, RankMemory]], list[Rejection]]:
        found: list[tuple[Mesh, Fit, RankMemory]] = []
        rejected: list[Rejection] = []
        for mesh in meshes(self._model, demand):
            # Tried in this order, and the cache is touched only where less does not do.
            cached_fits = False
            for fit in fits:
                if cached_fits and not fit.fp8:
                    continue
                memory = self.memory(demand, mesh, fit)
                reason = self.too_large(demand, memory)
                if reason is not None:
                    rejected.append(Rejection(f"{mesh} {fit}".strip(), reason))
                elif not fit.exact and not demand.lossy:
                    rejected.append(Rejection(f"{mesh} {fit}", "not exact: --allow-lossy admits it"))
                else:
                    found.append((mesh, fit, memory))
                cached_fits |= reason is None and not fit.fp8
        return found, rejected

    def _columns(
        self, demand: Demand, fitting: Collection[Mesh]
    ) -> tuple[list[tuple[Mesh, Fit, RankMemory]], list[Rejection]]:
        """The fewest groups of a batch that fit a mesh on which nothing else does; if none, weights are offloaded."""
        found: list[tuple[Mesh, Fit, RankMemory]] = []
        rejected: list[Rejection] = []
        counts = group_counts(demand.batch)
        # Without an accelerator weights that are offloaded stay in the same memory.
        for mesh in [] if self._spec.accelerator == "cpu" else meshes(self._model, demand):
            if mesh in fitting:
                continue
            for weights in (False, True):
                fits = [Fit(offload=True, weights=weights, groups=groups) for groups in counts]
                tried = [(fit, self.memory(demand, mesh, fit)) for fit in fits]
                least = next((each for each in tried if self.too_large(demand, each[1]) is None), None)
                if least is not None:
                    found.append((mesh, *least))
                    break
                fit, memory = tried[-1]
                rejected.append(Rejection(f"{mesh} {fit}", self.too_large(demand, memory) or ""))
        return found, rejected

    def _too_large(self, memory: RankMemory) -> str:
        parts = ", ".join(f"{name} {getattr(memory, name) / GB:.1f}" for name in ("weights", "cache", "working"))
        return f"needs {memory.total / GB:.1f} GB a rank ({parts}), there are {self.room / GB:.1f}"

    def _enough(self, demand: Demand) -> str:
        more = demand.gpus
        while more < MOST_GPUS:
            more = min(2 * more, MOST_GPUS)
            larger = replace(demand, gpus=more)
            fitting = (
                mesh for mesh in meshes(self._model, larger) if self.memory(larger, mesh, Fit()).total <= self.room
            )
            if least := min(fitting, key=lambda mesh: mesh.ranks, default=None):
                return f"{least.ranks} ranks would do ({least})"
        return "more ranks would not help: one rank's share of the weights is too large"

    def _least_host(self, demand: Demand, tried: Sequence[Mesh]) -> str | None:
        """What offloading lacks where only host memory is short; None where it would not help."""
        offloaded = [(mesh, self.memory(demand, mesh, Fit(offload=True))) for mesh in tried]
        short = [(mesh, memory) for mesh, memory in offloaded if memory.total <= self.room]
        if not short:
            return None
        mesh, memory = min(short, key=lambda pair: pair[1].host)
        return f"{mesh} {self.too_large(demand, memory)}"
