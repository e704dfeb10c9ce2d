"""How good a choice between methods was, judged from paired samples of all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .statistics import CONFIDENCE, RESAMPLES, SEED, Interval

MARGIN = 0.02
"""Methods that differ by no more than this are as good as each other."""


@dataclass(frozen=True)
class Cell:
    """One workload, measured with every method."""

    miss_rate: float  # New tokens over all tokens, T / (T + P)
    seconds: Mapping[str, Sequence[float]]  # Method -> samples; samples of one index are of one round
    chosen: str  # One of the methods


def judge(cells: Sequence[Cell]) -> dict[str, Any]:
    """The verdict over all cells.

    Times are relative to the mean of their round: a machine that drifts from round to round does not move them.
    """
    if not cells:
        raise ValueError("no cells")
    found = [_verdict(cell, _medians(cell)) for cell in cells]
    drawn = [_verdict(cell, _resampled(cell, index)) for index, cell in enumerate(cells)]
    differs = np.array([verdict.differs for verdict in found])[:, 0]
    right = np.array([verdict.right for verdict in found])[:, 0]
    regret = np.array([verdict.regret for verdict in found])[:, 0]
    counts = np.sum([verdict.differs for verdict in drawn], axis=0)
    shares = np.sum([verdict.differs & verdict.right for verdict in drawn], axis=0) / np.maximum(counts, 1)
    regrets = np.mean([verdict.regret for verdict in drawn], axis=0)
    share = float((differs & right).sum() / differs.sum()) if differs.any() else None
    wrong: list[dict[str, Any]] = []
    for cell, verdict, no, apart in zip(cells, drawn, ~right, differs, strict=True):
        if no and apart:
            interval = _interval(float(_verdict(cell, _medians(cell)).regret[0]), verdict.regret)
            wrong.append({"miss_rate": cell.miss_rate, "chosen": cell.chosen, "regret": interval.to_json()})
    beyond = sum(entry["regret"]["low"] > 0 for entry in wrong)
    enough = shares[counts > 0]
    return {
        "auto_right_share": share,
        "auto_right_share_within_interval": None if share is None else 1 - beyond / int(differs.sum()),
        "auto_mean_regret": float(regret.mean()),
        "intervals": {
            "auto_right_share": None if share is None or not len(enough) else _interval(share, enough).to_json(),
            "auto_mean_regret": _interval(float(regret.mean()), regrets).to_json(),
        },
        "cells": len(cells),
        "differing_cells": int(differs.sum()),
        "wrong": wrong,
    }


def crossover(cells: Sequence[Cell], below: str = "pass_q", above: str = "pass_kv") -> dict[str, Any]:
    """The miss rate up to which one method is the faster, and from which on the other.

    It is where a rule with a single threshold loses least over all cells, and between two cells where the logarithm of
    their time ratio, taken as linear in that of the miss rate, is zero.
    """
    ordered = sorted(cells, key=lambda cell: cell.miss_rate)
    rates = np.log([cell.miss_rate for cell in ordered])
    found = np.array([_log_ratio(_medians(cell), below, above) for cell in ordered])
    drawn = np.array([_log_ratio(_resampled(cell, index), below, above) for index, cell in enumerate(ordered)])
    value = _threshold(rates, found[:, 0])
    crossings = np.array([_threshold(rates, column) for column in drawn.T])
    finite = crossings[np.isfinite(crossings)]
    bounds = _interval(value, finite) if len(finite) else None
    result: dict[str, Any] = {
        "value": math.exp(value) if math.isfinite(value) else None,
        "low": None if bounds is None else math.exp(bounds.low),
        "high": None if bounds is None else math.exp(bounds.high),
        "share": len(finite) / len(crossings),
    }
    return result if math.isfinite(value) else {**result, "always": above if value < 0 else below}


@dataclass(frozen=True)
class _Verdict:
    """Per resample, of one cell."""

    differs: NDArray[np.bool_]
    right: NDArray[np.bool_]
    regret: NDArray[np.float64]


def _verdict(cell: Cell, medians: Mapping[str, NDArray[np.float64]]) -> _Verdict:
    stacked = np.stack(list(medians.values()))
    fastest = stacked.min(axis=0)
    second = np.partition(stacked, 1, axis=0)[1]
    regret = medians[cell.chosen] / fastest - 1
    return _Verdict(second / fastest > 1 + MARGIN, regret == 0, regret)


def _medians(cell: Cell) -> dict[str, NDArray[np.float64]]:
    return {name: np.array([np.median(values)]) for name, values in _relative(cell).items()}


def _resampled(cell: Cell, index: int) -> dict[str, NDArray[np.float64]]:
    """Medians of whole rounds, drawn for each cell by itself."""
    count = len(next(iter(cell.seconds.values())))
    rounds = np.random.default_rng([SEED, index]).integers(0, count, (RESAMPLES, count))
    return {name: np.median(values[rounds], axis=1) for name, values in _relative(cell).items()}


def _relative(cell: Cell) -> dict[str, NDArray[np.float64]]:
    """Times over the geometric mean of their round."""
    logs = {name: np.log(np.asarray(values, dtype=np.float64)) for name, values in cell.seconds.items()}
    mean = np.mean(list(logs.values()), axis=0)
    return {name: np.exp(values - mean) for name, values in logs.items()}


def _log_ratio(medians: Mapping[str, NDArray[np.float64]], below: str, above: str) -> NDArray[np.float64]:
    """Positive where `below` is the faster."""
    return np.log(medians[above] / medians[below])


def _threshold(rates: NDArray[np.float64], gains: NDArray[np.float64]) -> float:
    """The best threshold on an ascending axis; infinite where one side is always better."""
    # Gain of the rule with the first k cells below the threshold.
    totals = 2 * np.concatenate([[0.0], np.cumsum(gains)]) - gains.sum()
    best = int(np.argmax(totals))
    if best == 0:
        return float("-inf")
    if best == len(gains):
        return float("inf")
    # At the best k, the cell before gains and the one after loses.
    left, right = gains[best - 1], gains[best]
    share = left / (left - right) if left > right else 0.5
    return float(rates[best - 1] + share * (rates[best] - rates[best - 1]))


def _interval(value: float, resampled: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))
