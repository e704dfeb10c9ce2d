"""Runs that are simulated from end to end: a prompt that is read, and decoding over an offloaded cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megakv.attention.runahead import CHUNK_TOKENS
from megakv.base.partition import Partition, check_partition, from_fractions
from megakv.costmodel.chain import Chain
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import decode_methods
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.memory import rank_memory
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.presets import Hardware
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.simulation import CALM, Disturbances, Simulation
from megakv.offload.equations import WeightTimes
from megakv.offload.pipeline import Pipeline, StepTimes
from megakv.offload.times import OffloadedStep, layer_weight_bytes, offloaded_step
from megakv.runahead.chain_search import balanced_partition
from megakv.tracking.machine import version_info
from megakv.tracking.report import RankReport, RunReport


@dataclass(frozen=True)
class Simulated:
    """What was played, and what of it goes into a report."""

    played: Simulation
    predicted_s: float  # TTFT, or TTIT, without disturbances.
    tokens: Sequence[int]  # New ones of every rank.
    new_tokens: int
    ttft_s: float | None = None
    ttit_s: float | None = None


@dataclass(frozen=True)
class VirtualRun:
    """What is simulated, on which machine."""

    machine: Hardware
    model: ModelShape
    new: tuple[int, ...]  # Tokens of every sequence, and cached ones.
    cached: tuple[int, ...]
    cp_size: int
    tp_size: int
    disturbances: Disturbances = CALM
    progress: Callable[[int], object] | None = None  # As for `Simulation`.

    @cached_property
    def profile(self) -> HardwareProfile:
        return self.machine.on_mesh(cp_size=self.cp_size, tp_size=self.tp_size)

    def prefill(
        self, method: str, *, fractions: Sequence[float] | None = None, chunk_tokens: int = CHUNK_TOKENS
    ) -> Simulated:
        """A prompt that is read, and one token; `fractions` are the ranks' shares in ``runahead``, else balanced."""
        workload = Workload(self.new, self.cached, self.cp_size)
        options: dict[str, Any] = {"tp_size": self.tp_size, "chunk_tokens": chunk_tokens}
        times = PrefillTimes(self.profile, self.model, workload, **options)
        if fractions is not None:
            check_partition(fractions, self.cp_size, setting="--partition")
        partitions: tuple[Partition, ...] | None = None
        if method == "runahead" and fractions is not None:
            partitions = tuple(from_fractions(fractions, new) for new in self.new)
        elif method == "runahead":
            chain = Chain(self.profile, self.model, **options)
            lengths = zip(self.new, self.cached, strict=True)
            partitions = tuple(balanced_partition(chain, new, self.cp_size, cached=held) for new, held in lengths)
        played = times.play(method, partitions, self.disturbances, progress=self.progress)
        return Simulated(
            played,
            times.seconds(method, partitions),
            times.tokens(method, partitions),
            new_tokens=len(self.new),
            ttft_s=played.seconds,
        )

    def decoding(self, *, steps: int, weights_too: bool, host_bytes: int | None = None) -> Simulated:
        """Decoding over keys and values in host memory, each rank over its own link; all tokens are cached.

        weights_too: whether weights come over the same link.
        host_bytes: host memory of a rank; what has no room there lies on disk. None: there is room for all.
        Raises ValueError if the machine's link to host memory is not known, or its disk where that is needed.
        """
        profile, model, tp_size, ranks = self.profile, self.model, self.tp_size, self.cp_size * self.tp_size
        if profile.host_link is None:
            raise ValueError(
                "the hardware profile has no host_link: allowed: a known machine, or add it to the profile"
            )
        held = tuple(new + cached for new, cached in zip(self.new, self.cached, strict=True))
        workload = Workload((1,) * len(held), held, self.cp_size)
        options: dict[str, Any] = {"tp_size": tp_size, "weights": weights_too, "memory_bytes": host_bytes}
        options["sharers"] = min(ranks, profile.devices_per_host or 1)
        found = (
            offloaded_step(profile, profile.host_link, model, workload, method, **options)
            for method in decode_methods(self.cp_size, weights_here=not weights_too)
        )
        step = min(found, key=lambda step: step.seconds)
        row, inputs = model.attention(tp_size=tp_size).kv_row_bytes, model.input_bytes
        weight_bytes = layer_weight_bytes(model, tp_size=tp_size) * weights_too
        sent = inputs * step.split.recomputed, row * step.split.streamed, weight_bytes
        played = Simulation(ranks, self.disturbances, progress=self.progress)
        play_offload(played, step, len(model.layers), steps=steps, sent=sent)
        return Simulated(
            played,
            step.seconds,
            [-(-sum(self.new) // self.cp_size)] * ranks,
            new_tokens=steps * len(self.new),
            ttit_s=played.seconds / steps,
        )

    def report(self, simulated: Simulated, **values: Any) -> RunReport:
        """That of a run that took place on paper; `values` are its model, config and machine."""
        played, tokens = simulated.played, simulated.tokens
        row = self.model.attention(tp_size=self.tp_size).kv_row_bytes * len(self.model.layers)
        sequences, held = len(self.new), sum(self.cached) / self.cp_size
        memory = rank_memory(
            self.model,
            context=max(1, -(-(sum(self.new) + sum(self.cached)) // sequences)),
            batch=sequences,
            new=max(1, max(tokens) * self.cp_size // sequences),
            cp_size=self.cp_size,
            tp_size=self.tp_size,
        )
        ranks = [
            RankReport(
                rank=rank,
                host=f"host{rank // self.machine.spec.devices_per_host}",
                cp_rank=rank // self.tp_size,
                tp_rank=rank % self.tp_size,
                tokens=count,
                kv_bytes=round((count + held) * row),
                peak_bytes=memory.total,
                traffic=played.traffic(rank),
                events=sorted(played.events[rank], key=lambda event: event.start),
            )
            for rank, count in enumerate(tokens)
        ]
        return RunReport(
            mesh={"cp": self.cp_size, "tp": self.tp_size},
            prompt_tokens=sum(tokens) // self.tp_size,
            new_tokens=simulated.new_tokens,
            ttft_s=simulated.ttft_s,
            ttit_s=simulated.ttit_s,
            generated_s=played.seconds,
            ranks=ranks,
            versions=version_info(),
            **values,
        )


def play_offload(
    played: Simulation, step: OffloadedStep, layers: int, *, steps: int, sent: tuple[int, int, int] = (0, 0, 0)
) -> None:
    """Steps of decoding, each rank for itself, with keys and values behind one host link (KVPR).

    `sent` are bytes of a layer on the link: activations, keys and values, weights.
    """
    for rank in range(len(played.now)):
        pipeline = Pipeline([step.times], step.weights, ahead=True)
        for _ in range(steps):
            for layer in range(layers):
                _play_layer(played, rank, pipeline, step, layer, sent)
            played.compute("dense", rank, step.times.outside_s)
            pipeline.device = played.now[rank]


def _play_layer(
    played: Simulation, rank: int, pipeline: Pipeline, step: OffloadedStep, layer: int, sent: tuple[int, int, int]
) -> None:
    slower, later = played.computing(rank, 1.0), played.sending(rank, rank, 1.0)
    times = _scaled(step.times, slower, later)
    pipeline.weights = weights = WeightTimes(step.weights.keys_s * later, step.weights.others_s * later)
    (group,) = pipeline.layer([times])
    input_bytes, row_bytes, weight_bytes = sent
    if input_bytes:
        played.transfer("activations", [rank], group.begun + times.landed_s, times.landed_s, input_bytes, layer)
    if row_bytes:
        played.transfer("kv", [rank], group.sent, times.sent_s - times.landed_s, row_bytes, layer)
    if weight_bytes:
        keys = round(weight_bytes * weights.keys_s / (weights.keys_s + weights.others_s))
        played.transfer("weights", [rank], group.begun, weights.keys_s, keys, layer)
        played.transfer("weights", [rank], pipeline.weights_there, weights.others_s, weight_bytes - keys, layer)
        played.wait("weights", rank, pipeline.weights_there, layer)
    if times.recompute_s:
        # All but the last activations are recomputed as they land.
        played.wait("activations", rank, group.begun + times.first_s, layer)
        played.computed("recompute", rank, times.recompute_s - times.last_s, layer)
        played.wait("activations", rank, group.queries - times.last_s, layer)
        played.computed("recompute", rank, times.last_s, layer)
    if times.host_s:
        played.transfer("host attention", [rank], group.queries + times.host_s, times.host_s, 0, layer)
    played.wait("kv", rank, group.sent, layer)
    played.computed("attention", rank, times.attend_s, layer)
    played.wait("host attention", rank, group.attended, layer)
    played.computed("dense", rank, times.layer_s, layer)


def _scaled(times: StepTimes, slower: float, later: float) -> StepTimes:
    """A layer on a slower accelerator, behind a slower link."""
    own = {name: getattr(times, name) * slower for name in ("recompute_s", "last_s", "layer_s", "attend_s")}
    link = {name: getattr(times, name) * later for name in ("sent_s", "landed_s", "first_s", "host_s")}
    return replace(times, **own, **link)
