"""Decode steps of tensor-parallel ranks that are not there: of every rank the kernels, timed alone on this machine.

A layer lasts as long as the slowest rank's attention and projections, then the MLP, which ranks share evenly; the cost
model adds what no single rank can show: sums over ranks, what sharing heads takes, and a layer's small operations. So
ranks do not compete here for memory, as they would as processes of one host. The output head is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile, load_profile
from megakv.costmodel.head_times import HeadTimes, RankWork
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.stopwatch import Pool
from megakv.fairkv.mapper import map_heads

from .charts import Chart, predicted_over
from .head_division import Budgets, Division, divide_by, make_mapping, profile_of, skewed_budgets
from .models import DTYPES, model_config
from .options import CHOSEN, CONTIGUOUS
from .profiles import lone_profile, profiles_of
from .publish import show
from .ragged_heads import HeadShape, TokenPool
from .statistics import RESAMPLES, SEED, Interval, interval
from .virtual_ranks import Bench, FeedForward, Projections, VirtualRanks

Rows = list[dict[str, Any]]
Row = Mapping[str, Any]
HOW = (
    "the kernels of every rank timed alone on one machine, one rank after the other, and put together by the cost "
    "model: no step of so many ranks was measured"
)
TITLE = "Decode steps of virtual ranks: kernels timed rank by rank, put together by the cost model"


class VirtualMachine:
    """What this machine, and the sums of another one, make of steps on any number of ranks."""

    def __init__(self, arguments: argparse.Namespace, sums: Path):
        self._arguments = arguments
        heads = arguments.kv_heads * arguments.group
        device, dtype = torch.device("cpu"), DTYPES[arguments.dtype]
        config = model_config(argparse.Namespace(**{**vars(arguments), "heads": heads, "vocab": 1}))
        self._model = ModelShape.from_config(config, dtype=dtype)
        self._shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, dtype, device)
        own = lone_profile(device, self._model, arguments.profile_seconds)
        self._profile = _with_sums(own, load_profile(sums, setting="--sums"))
        if arguments.json:
            self._profile.save(profiles_of(Path(arguments.json)) / "1.json")
        self._bench, self._weights = Bench(device, arguments.repeats), Pool(dtype, device)

    def measure(self, tp: int, batch: int, kept: int, methods: Sequence[str]) -> Rows:
        """A row for every method."""
        arguments = self._arguments
        shared = self._profile.sum_times(tp, shared_memory=True) is not None
        times = HeadTimes(self._profile, self._model, tp_size=tp, batch=batch, shared_memory=shared)
        budgets = skewed_budgets(arguments.layers, arguments.kv_heads, kept, arguments.sigma, arguments.seed)
        divisions = [_division(name, budgets, times) for name in methods]
        kernels, feed_forward = self._kernels(divisions, times)
        place = {"ranks": tp, "batch": batch, "kept": kept}
        return [
            {
                **place,
                "method": division.name,
                "rank_kernel_seconds": seconds.tolist(),
                "feed_forward_seconds": feed_forward.tolist(),
                **self._modelled(division, times),
                **division.facts(),
            }
            for division, seconds in zip(divisions, kernels, strict=True)
        ]

    def _kernels(
        self, divisions: Sequence[Division], times: HeadTimes
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Of every division ``[repeats, layers, ranks]`` attention and projections; ``[repeats, layers]`` the MLP."""
        arguments, tp, batch = self._arguments, times.tp_size, times.batch
        longest = max(max(row) for division in divisions for row in division.budgets)
        pool = TokenPool(self._shape, longest, arguments.seed)
        forward = FeedForward(arguments.hidden, arguments.intermediate // tp, batch, self._weights)
        virtual, found, shared = [VirtualRanks(each, pool, batch) for each in divisions], [], []
        for layer in range(arguments.layers):
            works: list[Any] = []
            for ranks in virtual:
                held = zip(ranks.layers([layer]), ranks.held_heads()[layer].tolist(), strict=True)
                for rank, heads in held:
                    projections = Projections(self._shape, heads, arguments.hidden, batch, self._weights)
                    works.append(lambda rank=rank, projections=projections: (projections(), rank.attend()))
                works.append(forward)
            with torch.inference_mode():
                seconds = self._bench.by_turns(works).reshape(arguments.repeats, len(divisions), tp + 1)
            found.append(np.moveaxis(seconds[..., :tp], 1, 0))
            shared.append(seconds[..., tp].mean(axis=1))
        return np.stack(found, axis=2), np.stack(shared, axis=1)

    def _modelled(self, division: Division, times: HeadTimes) -> dict[str, float]:
        """What the cost model says: of the step, and of that what kernels are not."""
        predicted = exchanged = 0.0
        dense = TokenTimes(self._profile, self._model, tp_size=times.tp_size)
        issued = times.attention([RankWork(0, 0)] * times.tp_size)
        for layer, works in enumerate(division.works(times.batch)):
            costs = times.costs(layer)
            seconds = costs.seconds(works, times.shared_s(division.shared_entries(layer)))
            predicted += seconds
            exchanged += seconds - costs.slowest(works) - issued - dense.feed_forward(layer, times.batch)
        return {"predicted_step_s": predicted, "modelled_s": exchanged}


def _with_sums(profile: HardwareProfile, other: HardwareProfile) -> HardwareProfile:
    """A machine whose ranks exchange as another's do."""
    names = ("exchange", "exchange_inside", "exchange_collective", "sums", "devices_per_host")
    return profile.model_copy(update={name: getattr(other, name) for name in names})


def _division(name: str, budgets: Budgets, times: HeadTimes) -> Division:
    place = {"ranks": times.tp_size, "batch": times.batch}
    if name == CHOSEN:
        mapping = map_heads(profile_of(budgets), tp_size=times.tp_size, times=times)
    else:
        mapping = make_mapping(name, budgets, **place)
    return divide_by(name, budgets, mapping, **place)


def step_seconds(row: Row, rounds: Any = slice(None)) -> float:
    """A row's step: of every rank and layer the median of some rounds, and the slowest rank's of every layer."""
    ranks, shared = (np.asarray(row[name])[rounds] for name in ("rank_kernel_seconds", "feed_forward_seconds"))
    kernels = np.median(ranks, axis=0).max(axis=-1) + np.median(shared, axis=0)
    return float(kernels.sum()) + float(row["modelled_s"])


def regime(row: Row) -> str:
    return f"TP {row['ranks']}, {row['batch']} x {row['kept']}"


def summarise(rows: Rows) -> dict[str, Any]:
    """Gains over contiguous heads, of kernels that were measured and as predicted; copies by batch over by tokens."""
    measured: dict[str, dict[str, Any]] = {}
    predicted: dict[str, dict[str, float]] = {}
    by_copies: dict[str, dict[str, Any]] = {}
    errors, steps = [], []
    for name in dict.fromkeys(map(regime, rows)):
        methods = {row["method"]: row for row in rows if regime(row) == name}
        base = methods[CONTIGUOUS]
        others = [row for method, row in methods.items() if method != CONTIGUOUS]
        measured[name] = {row["method"]: _ratio(base, row).to_json() for row in others}
        predicted[name] = {row["method"]: base["predicted_step_s"] / row["predicted_step_s"] for row in others}
        errors += [abs(measured[name][each]["value"] / gain - 1) for each, gain in predicted[name].items()]
        steps += [abs(row["predicted_step_s"] / step_seconds(row) - 1) for row in methods.values()]
        by_copies[name] = {
            method.removeprefix("dp"): _ratio(row, methods[other]).to_json()
            for method, row in methods.items()
            if method.startswith("dp") and (other := f"split{method[-1]}") in methods
        }
    return {
        "how": HOW,
        "prediction_median_error": float(np.median(errors)),
        "prediction_largest_error": max(errors),
        "predictions_within_10_percent": sum(error <= 0.1 for error in errors),
        "predictions": len(errors),
        "step_median_error": float(np.median(steps)),
        "measured_gain": measured,
        "predicted_gain": predicted,
        "batch_over_tokens": by_copies,
    }


def _ratio(slow: Row, fast: Row) -> Interval:
    """Of two steps of one regime; the interval is over rounds, whose kernels were timed in turn."""
    count, rng = len(slow["rank_kernel_seconds"]), np.random.default_rng(SEED)
    drawn = rng.integers(0, count, (RESAMPLES // 20, count))
    resampled = np.array([step_seconds(slow, rounds) / step_seconds(fast, rounds) for rounds in drawn])
    return interval(step_seconds(slow) / step_seconds(fast), resampled)


def show_steps(rows: Rows, summary: Row) -> None:
    """The table, which says what was measured and what was not."""
    said = []
    for row in rows:
        gains = {kind: summary[kind][regime(row)].get(row["method"]) for kind in ("measured_gain", "predicted_gain")}
        said.append({**row, "step": step_seconds(row), **gains})
    columns = "ranks batch kept method utilisation:% step:ms predicted_step_s:ms measured_gain predicted_gain"
    show(said, columns, TITLE)
    print(f"\nSteps: {summary['how']}.")


def chart(summary: Row, subtitle: str) -> Chart:
    """Predicted gains over those of measured kernels."""
    points = [
        {"measured": gain["value"], "predicted": summary["predicted_gain"][name][method], "method": method}
        for name, gains in summary["measured_gain"].items()
        for method, gain in gains.items()
    ]
    words = {"x_label": f"gain over contiguous heads, by kernels timed rank by rank; {subtitle}"}
    words["title"] = "Virtual ranks: gains predicted, and put together of kernels"
    return predicted_over(points, "measured", "method", **words)
