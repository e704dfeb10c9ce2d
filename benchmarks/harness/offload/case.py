"""One case of `offload.py`: its methods in turns, and what their generations came to."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megakv.costmodel.shape import ModelShape
from megakv.offload.costs import LayerSpeeds
from megakv.offload.method import Split
from megakv.offload.methods import methods_of
from megakv.offload.pipeline import layer_times
from megakv.offload.pipeline import step_seconds as pipeline_seconds
from megakv.offload.record import StepRecord
from megakv.offload.times import group_costs

from ..models import DTYPES, drawn_model, random_ids
from .decoder import Decoder, Sample, config_of
from .plan import CHOICES, IN_MEMORY, Case, variant

WARM_UP = 12  # Tokens of an untimed generation, at most: buffers and caches are filled, and costs are learned
TRIALS = 3  # Such generations by `auto`, which tries its plans in turns before it settles; others have one
EMPTY_TURNS = 5  # Generations from a prompt of one token, for what a step takes beside what is cached
DIGITS = 4
AGAIN = "again"
"""The best of what `auto` chooses from, in an engine of its own: how far two measurements of the same differ."""
CLOSE = 1.15  # Methods that are slower than the fastest by more have no further rounds where `auto` is measured

Turn = list[Sample]
"""One generation of the whole batch: row-by-row, a call for each group."""


class CaseBench:
    """Measures a case."""

    def __init__(self, arguments: argparse.Namespace, case: Case, device: torch.device, rate_gb_s: float):
        self._arguments, self._case, self._rate_gb_s = arguments, case, rate_gb_s
        config, dtype = config_of(case.model, arguments, positions=case.prompt + case.new), DTYPES[arguments.dtype]
        with device:
            self._model = drawn_model(config, dtype)
        self._shape = ModelShape.from_config(config, dtype=dtype)
        self._layers = len(self._shape.layers)
        self._ids = random_ids(config.vocab_size, case.prompt, device, case.batch)
        self._stays = device.type == "cpu"
        self._ready_made: dict[str, Decoder] = {}
        self._profiles: dict[str, LayerSpeeds | None] = {}  # By method, what was measured before its first step
        self._tokens: Tensor | None = None

    def measure(self, *, least: int, most: int, budget_s: float) -> list[dict[str, Any]]:
        names, again = self._case.methods, None
        try:
            self._expected()
            if self._stays:
                for name in names:
                    self._warm_up(self._make(name))
            turns: dict[str, list[Turn]] = {name: [] for name in names}
            begun = time.perf_counter()
            for count in range(most):
                if count == least and "auto" in turns:
                    # What is far slower than others is known well enough: the rest of the time is for close ones.
                    names = contenders(turns)
                    if (again := self._twin(turns, names)) is not None:
                        names, turns[AGAIN] = (*names, AGAIN), []
                    begun = max(begun, time.perf_counter() - budget_s / 2)
                if count >= least and time.perf_counter() - begun > budget_s:
                    break
                for place in range(len(names)):
                    name = names[(count + place) % len(names)]
                    turns[name].append(self._turn(name))
        finally:
            for decoder in self._ready_made.values():
                decoder.close()
        rows = [self._row(name, turns[name]) for name in self._case.methods]
        self._add_forecasts(rows)
        for row in rows:
            if row["method"] == again and turns[AGAIN]:
                row |= {"again_seconds": [step_seconds(turn) for turn in turns[AGAIN]], "again_from": least}
        return rows

    def _twin(self, turns: Mapping[str, Sequence[Turn]], names: Sequence[str]) -> str | None:
        """Make the best of what `auto` chooses from once more, where it goes on and there is time for it: its name."""
        choices = [name for name in names if name != "auto"]
        if self._arguments.quick or not choices:
            return None
        best = min(choices, key=medians(turns).__getitem__)
        self._warm_up(self._make(best, AGAIN))
        return best

    def _turn(self, name: str) -> Turn:
        decoder = self._ready_made.get(name) or self._make(name)
        try:
            if not self._stays:
                self._warm_up(decoder)
            turn = [decoder.generate(share, self._case.new) for share in self._shares(decoder)]
            self._profiles[name] = decoder.profile()
        finally:
            if not self._stays:
                decoder.close()
        return turn

    def _shares(self, decoder: Decoder) -> Sequence[Tensor]:
        return self._ids.chunk(self._case.groups) if variant(decoder.name).rows else (self._ids,)

    def _warm_up(self, decoder: Decoder) -> None:
        new, trials = min(self._case.new, WARM_UP), TRIALS if variant(decoder.name).method == "auto" else 1
        for _ in range(trials):
            for share in self._shares(decoder):
                decoder.generate(share, new)

    def _make(self, name: str, kept_as: str = "") -> Decoder:
        made = self._decoder(name, self._case)
        if self._stays:
            self._ready_made[kept_as or name] = made
        return made

    def _expected(self) -> Tensor:
        if self._tokens is None:
            with closing(self._decoder(IN_MEMORY, self._case)) as plain:
                self._tokens = plain.generate(self._ids, self._case.new).tokens
        return self._tokens

    def _decoder(self, name: str, case: Case) -> Decoder:
        return Decoder(name, self._model, case, self._shape, chunk_tokens=self._arguments.chunk)

    def _row(self, name: str, turns: Sequence[Turn]) -> dict[str, Any]:
        case = self._case
        samples = [sample for turn in turns for sample in turn]
        steps = [step for sample in samples for step in sample.steps]
        seconds = [step_seconds(turn) for turn in turns]
        middle = statistics.median(seconds)
        same = [torch.cat([sample.tokens for sample in turn]) == self._expected() for turn in turns]
        bytes_in = statistics.mean(sum(sample.bytes_in for sample in turn) for turn in turns)
        bytes_out = statistics.mean(sum(sample.bytes_out for sample in turn) for turn in turns)
        row: dict[str, Any] = {
            "part": case.part,
            "shape": case.model,
            "layers": self._layers,
            "batch": case.batch,
            "beams": case.beams,
            # What was chosen is said by the steps.
            "groups": variant(name).groups(case) or round(statistics.median(len(step.plan.splits) for step in steps)),
            "context": case.prompt,
            "new_tokens": case.new,
            "weights_offloaded": case.weights,
            "link": "measured" if case.link_gb_s is None else "emulated",
            "link_gb_s": self._rate_gb_s,
            "method": name,
            "lossy": variant(name).lossy,
            "seconds": seconds,
            "prompt_s": [sum(sample.prompt_s for sample in turn) for turn in turns],
            "decode_s": [sum(sum(sample.all_seconds) for sample in turn) for turn in turns],
            "tokens_per_s": case.batch / middle,
            "bytes_in": bytes_in,
            "bytes_out": bytes_out,
            "device_bytes": max(max(sample.device_bytes) for sample in samples),
            "cache_bytes": case.cache_bytes(self._shape),
            "tokens_equal": all(bool(each.all()) for each in same),
            "token_agreement": statistics.mean(each[:, -case.new :].double().mean().item() for each in same),
            "link_utilisation": bytes_in / (self._rate_gb_s * 1e9) / middle,
        }
        if all(sample.waited_s is not None for sample in samples):
            waited = sum(sample.waited_s or 0.0 for sample in samples)
            row["compute_utilisation"] = 1 - waited / sum(statistics.mean(sample.seconds) for sample in samples)
        if steps:
            row |= planned(steps, turns)
            if (io := turns[-1][-1].disk_io) is not None:
                row |= {
                    "in_memory_share": case.in_memory,
                    "disk": "emulated",
                    "disk_gb_s": case.disk_gb_s,
                    "disk_io": io,
                    "disk_bytes": statistics.mean(step.disk_bytes for step in steps),
                    # Of the rate at which rows came, as steps showed it.
                    "disk_utilisation": statistics.median(step.report().disk_utilisation for step in steps),
                }
        return row

    def _add_forecasts(self, rows: Sequence[dict[str, Any]]) -> None:
        """Set `forecast_s` in the rows of a case whose methods are compared with a step in memory."""
        case = self._case
        # What lies outside a window is not read, and the forecast is of a model without one.
        other = case.weights or case.in_memory is not None or case.groups > 1 or case.part == "windows"
        if other or IN_MEMORY not in case.methods:
            return
        alone = self._empty_step()
        for row in rows:
            profile = self._profiles[row["method"]]
            if profile is not None and not row["lossy"]:
                tokens = round(statistics.median(cached for cached, _ in row["split_points"]))
                row["forecast_s"] = self._forecast(row["method"], profile, tokens, alone / self._layers)

    def _empty_step(self) -> float:
        """Seconds of an offloaded step that has next to nothing cached: what it takes beside the link and attention."""
        with closing(self._decoder("stream", replace(self._case, prompt=1))) as empty:
            turns = [[empty.generate(self._ids[:, :1], self._case.new)] for _ in range(EMPTY_TURNS)]
        return statistics.median(step_seconds(turn) for turn in turns)

    def _forecast(self, method: str, profile: LayerSpeeds, tokens: int, device_s: float) -> float:
        """Predict a step before any step has shown anything."""
        costs = replace(profile.costs(self._case.batch), device_s=device_s)
        group = replace(group_costs(costs, tokens), chunk=self._arguments.chunk)
        # Without activations there is nothing to recompute from, and without its speed the host attends to nothing.
        group = group if profile.input_bytes else replace(group, inputs=0)
        ways = methods_of(variant(method).method).values()
        # Where that leaves nothing, all is sent.
        splits = [split for way in ways if (split := way.split(group)) is not None] or [Split(tokens)]
        return min(pipeline_seconds([layer_times(group, split)], self._layers) for split in splits)


def contenders(turns: Mapping[str, Sequence[Turn]]) -> tuple[str, ...]:
    """Methods that further rounds are for: `auto`, and those that may be the best of its choices."""
    times = medians(turns)
    fastest = min(times.values())
    return tuple(name for name in times if name == "auto" or times[name] <= CLOSE * fastest)


def medians(turns: Mapping[str, Sequence[Turn]]) -> dict[str, float]:
    """Seconds of a step, of `auto` and its choices."""
    return {name: statistics.median(map(step_seconds, turns[name])) for name in (*CHOICES, "auto") if name in turns}


def step_seconds(turn: Turn) -> float:
    """Seconds of a step of the whole batch: row-by-row, one of every call."""
    return sum(statistics.median(sample.seconds) for sample in turn)


def planned(steps: Sequence[StepRecord], turns: Sequence[Turn]) -> dict[str, Any]:
    """Predictions and choices of the scheduler, step by step."""
    calls = len(turns[0])
    # Corrected by the steps before, as the scheduler compares plans; and as the cost model alone has it.
    said = [step.predicted_s for step in steps], [step.plan.seconds for step in steps]
    errors = [
        [round(abs(step.measured_s / each - 1), DIGITS) for step, each in zip(steps, seconds, strict=True)]
        for seconds in said
    ]
    return {
        "predicted_s": calls * statistics.median(said[0]),
        "cost_model_s": calls * statistics.median(said[1]),
        "prediction_errors": errors[0],
        "cost_model_errors": errors[1],
        "split_points": [[step.cached, step.split.recomputed] for step in turns[-1][0].steps],
        "recomputed": calls * statistics.mean(step.split.recomputed for step in steps),
        "on_host": calls * statistics.mean(step.split.on_host for step in steps),
        "weight_bytes": calls * statistics.mean(step.weight_bytes for step in steps),
    }
