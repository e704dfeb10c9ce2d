"""One case of `offload.py`: its methods in turns, and what their generations came to."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megakv.offload.profile import OffloadProfile
from megakv.offload.record import StepRecord

from .models import DTYPES, random_ids
from .offload_emulation import disk_figures, threads_on
from .offload_forecast import add_forecasts
from .offload_plan import CHOICES, IN_MEMORY, Case, Shape, shape_of, variant
from .offloads import Decoder, Sample, random_model

WARM_UP = 12
"""Tokens of an untimed generation, at most: buffers and caches are filled, and costs are learned."""
TRIALS = 3
"""Such generations by `auto`, which tries its plans in turns before it settles; others have one."""
DIGITS = 4
AGAIN = "again"
"""The best of what `auto` chooses from, in an engine of its own: how far two measurements of the same differ."""
CLOSE = 1.15
"""Methods that are slower than the fastest by more than that have no further rounds where `auto` is measured."""

Turn = list[Sample]
"""One generation of the whole batch: row-by-row, a call for each group."""


class CaseBench:
    """Measures a case.

    On the CPU all methods stand ready side by side. An accelerator, and the host's memory, hold one of them at a time:
    each is made anew for its turn.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        case: Case,
        device: torch.device,
        rate_gb_s: float,
        ready: Callable[[], object] = lambda: None,
    ):
        self._arguments, self._case, self._rate_gb_s, self._ready = arguments, case, rate_gb_s, ready
        self._shape = shape_of(case.model, arguments)
        self._cores = arguments.cores if case.processes == 1 else None
        self._ids = random_ids(self._shape.vocab, case.prompt, device, case.batch)
        positions = case.prompt + case.new
        self._model = random_model(self._shape, positions=positions, dtype=DTYPES[arguments.dtype], device=device)
        self._stays = device.type == "cpu"
        self._ready_made: dict[str, Decoder] = {}
        self._kept_bytes: dict[str, tuple[int, int]] = {}
        self._profiles: dict[str, OffloadProfile | None] = {}
        self._busy: dict[str, float | None] = {}
        self._warm_up_s: dict[str, float] = {}
        self._tokens: Tensor | None = None
        self._again: str | None = None

    def measure(self, *, least: int, most: int, budget_s: float) -> list[dict[str, Any]]:
        """The rows of the case."""
        names, new = self._case.methods, self._case.new
        try:
            expected = self._expected()
            if self._stays:
                for name in names:
                    self._warm_up(name, self._make(name))
            turns: dict[str, list[Turn]] = {name: [] for name in names}
            begun = time.perf_counter()
            for count in range(most):
                if count == least and "auto" in turns:
                    # What is far slower than others is known well enough: the rest of the time is for close ones.
                    names = contenders(turns)
                    names = (*names, *self._twin(turns, names))
                    begun = max(begun, time.perf_counter() - budget_s / 2)
                if count >= least and time.perf_counter() - begun > budget_s:
                    break
                for place in range(len(names)):
                    name = names[(count + place) % len(names)]
                    turns.setdefault(name, []).append(self._turn(name, new))
        finally:
            for decoder in self._ready_made.values():
                decoder.close()
        rows = [self._row(name, turns[name], expected) for name in self._case.methods]
        add_forecasts(rows, self._case, self._profiles, layers=self._shape.layers, chunk=self._arguments.chunk)
        for row in rows:
            if row["method"] == self._again and AGAIN in turns:
                row |= {"again_seconds": [step_seconds(turn) for turn in turns[AGAIN]], "again_from": least}
        return rows

    def _twin(self, turns: Mapping[str, Sequence[Turn]], names: Sequence[str]) -> tuple[str, ...]:
        """Make the best of what `auto` chooses from once more, where it goes on and there is time for it."""
        found = medians(turns)
        choices = [name for name in names if name != "auto"]
        if self._arguments.quick or self._case.part == "processes" or not choices:
            return ()
        self._again = min(choices, key=lambda name: found[name])
        made = Decoder(self._again, self._model, self._case, self._shape, chunk_tokens=self._arguments.chunk)
        self._ready_made[AGAIN] = made
        self._warm_up(AGAIN, made)
        return (AGAIN,)

    def measure_alone(self, name: str, repeats: int) -> dict[str, Any]:
        """The row of one method, made anew and measured so many times in a row."""
        self._stays = False
        expected = self._expected()
        turns = [self._turn(name, self._case.new) for _ in range(repeats)]
        return self._row(name, turns, expected)

    def _turn(self, name: str, new: int) -> Turn:
        decoder = self._ready_made.get(name) or self._make(name)
        try:
            if not self._stays:
                self._warm_up(name, decoder)
            self._ready()
            with threads_on(self._cores):
                turn = [decoder.generate(share, new) for share in self._shares(name)]
            self._kept_bytes[name], self._busy[name] = decoder.kept_bytes(), decoder.busy
            self._profiles[name] = decoder.profile()
        finally:
            if not self._stays:
                decoder.close()
        return turn

    def _shares(self, name: str) -> Sequence[Tensor]:
        """Prompts of each call."""
        return self._ids.chunk(self._case.groups) if variant(name).rows else (self._ids,)

    def _warm_up(self, name: str, decoder: Decoder) -> None:
        new, trials = min(self._case.new, WARM_UP), TRIALS if variant(name).method == "auto" else 1
        for trial in range(trials):
            self._ready()
            watch = trial == trials - 1
            turn = [decoder.generate(share, new, watch=watch) for share in self._shares(name)]
        self._warm_up_s[name] = step_seconds(turn)

    def _make(self, name: str) -> Decoder:
        made = Decoder(name, self._model, self._case, self._shape, chunk_tokens=self._arguments.chunk)
        if self._stays:
            self._ready_made[name] = made
        return made

    def _expected(self) -> Tensor:
        """Tokens of the model with everything in memory."""
        if self._tokens is None:
            plain = Decoder(IN_MEMORY, self._model, self._case, self._shape, chunk_tokens=self._arguments.chunk)
            try:
                self._tokens = plain.generate(self._ids, self._case.new).tokens
            finally:
                plain.close()
        return self._tokens

    def _row(self, name: str, turns: Sequence[Turn], expected: Tensor) -> dict[str, Any]:
        row = row_of(self._case, name, turns, shape=self._shape, rate_gb_s=self._rate_gb_s)
        steps = [step for turn in turns for sample in turn for step in sample.steps]
        if self._busy[name] is not None:
            row["compute_utilisation"] = self._busy[name]
        if steps:
            row |= planned(steps, turns)
            row["breakdown_s"] = breakdown(row, self._shape, self._kept_bytes[name], self._case, self._rate_gb_s)
            if (io := turns[-1][-1].disk_io) is not None:
                row |= disk_figures(self._case, steps, io)
        same = [torch.cat([sample.tokens for sample in turn]) == expected for turn in turns]
        new = self._case.new
        row["warm_up_s"] = self._warm_up_s[name]
        row["tokens_equal"] = all(bool(each.all()) for each in same)
        row["token_agreement"] = statistics.mean(each[:, -new:].double().mean().item() for each in same)
        row["cache_bytes"] = self._case.cache_bytes(self._shape, DTYPES[self._arguments.dtype].itemsize)
        return row


def contenders(turns: Mapping[str, Sequence[Turn]]) -> tuple[str, ...]:
    """Of methods in turns, those that further rounds are for: `auto`, and what may be the best of its choices."""
    times = medians(turns)
    fastest = min(times.values())
    return tuple(name for name in times if name == "auto" or times[name] <= CLOSE * fastest)


def medians(turns: Mapping[str, Sequence[Turn]]) -> dict[str, float]:
    """Seconds of a step, of `auto` and its choices."""
    return {name: statistics.median(map(step_seconds, turns[name])) for name in (*CHOICES, "auto") if name in turns}


def step_seconds(turn: Turn) -> float:
    """Of a step of the whole batch: row-by-row, one of every call."""
    return sum(statistics.median(sample.seconds) for sample in turn)


def row_of(case: Case, name: str, turns: Sequence[Turn], *, shape: Shape, rate_gb_s: float) -> dict[str, Any]:
    """Times, bytes and memory of a method's generations."""
    seconds = [step_seconds(turn) for turn in turns]
    step_s = statistics.median(seconds)
    samples = [sample for turn in turns for sample in turn]
    row: dict[str, Any] = {
        "part": case.part,
        "shape": case.model,
        "layers": shape.layers,
        "batch": case.batch,
        "groups": 1 if variant(name).rows else case.groups,
        "processes": case.processes,
        "context": case.prompt,
        "new_tokens": case.new,
        "weights_offloaded": case.weights,
        "link": "measured" if case.link_gb_s is None else "emulated",
        "link_gb_s": rate_gb_s,
        "method": name,
        "lossy": variant(name).kv_bits is not None,
        "seconds": seconds,
        "decode_s": [sum(sum(sample.all_seconds) for sample in turn) for turn in turns],
        "tokens_per_s": case.batch / step_s,
        "bytes_in": statistics.mean(sum(sample.bytes_in for sample in turn) for turn in turns),
        "bytes_out": statistics.mean(sum(sample.bytes_out for sample in turn) for turn in turns),
        "device_bytes": max(max(sample.device_bytes) for sample in samples),
    }
    row["link_utilisation"] = row["bytes_in"] / (rate_gb_s * 1e9) / step_s
    if all(sample.waited_s is not None for sample in samples):
        passed = [statistics.mean(sample.seconds) for sample in samples]
        waited = [sample.waited_s or 0.0 for sample in samples]
        row["compute_utilisation"] = 1 - sum(waited) / sum(passed)
    if case.part == "throughput":
        row["timeline"] = timeline(turns[-1][-1])
    return row


def planned(steps: Sequence[StepRecord], turns: Sequence[Turn]) -> dict[str, Any]:
    """What the scheduler predicted and chose, step by step."""
    calls = len(turns[0])
    return {
        # Corrected by the steps before, as the scheduler compares plans; and as the cost model alone has it.
        "predicted_s": calls * statistics.median(step.predicted_s for step in steps),
        "cost_model_s": calls * statistics.median(step.plan.seconds for step in steps),
        "prediction_errors": [round(abs(step.measured_s / step.predicted_s - 1), DIGITS) for step in steps],
        "cost_model_errors": [round(abs(step.measured_s / step.plan.seconds - 1), DIGITS) for step in steps],
        "split_points": [[step.cached, step.split.recomputed] for step in turns[-1][0].steps],
        "recomputed": calls * statistics.mean(step.split.recomputed for step in steps),
        "on_host": calls * statistics.mean(step.split.on_host for step in steps),
        "weight_bytes": calls * statistics.mean(step.weight_bytes for step in steps),
        "plans": {name: sum(step.plan.name == name for step in steps) for name in {step.plan.name for step in steps}},
    }


def breakdown(
    row: dict[str, Any], shape: Shape, kept_bytes: tuple[int, int], case: Case, rate_gb_s: float
) -> dict[str, float]:
    """Seconds of a step's tasks (Figure 10): transfers are their bytes over the link's rate, and overlap the others."""
    _, input_bytes = kept_bytes
    activations_in = row["recomputed"] * input_bytes * shape.layers
    activations_out = case.batch * input_bytes * shape.layers
    link = rate_gb_s * 1e9
    return {
        "load weights": row["weight_bytes"] / link,
        "load cache": max(0.0, row["bytes_in"] - row["weight_bytes"] - activations_in) / link,
        "load activations": activations_in / link,
        "compute": row.get("compute_utilisation", 0.0) * statistics.median(row["seconds"]),
        "store cache": max(0.0, row["bytes_out"] - activations_out) / link,
        "store activations": activations_out / link,
    }


def timeline(sample: Sample) -> dict[str, list[float]]:
    """Of a generation's counted steps: when each ended, its share of computing where known, and bytes on the device."""
    ends, busy = [], []
    at = 0.0
    for step in sample.steps:
        at += step.measured_s
        ends.append(round(at, DIGITS))
        if sample.waited_s is not None:
            busy.append(round(1 - step.waited_s / step.measured_s, DIGITS))
    return {"seconds": ends, "compute_utilisation": busy, "device_bytes": [float(n) for n in sample.device_bytes]}
