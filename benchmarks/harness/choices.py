"""How good a choice between methods was, judged from paired samples of all of them.

Times are relative to the mean of their round: a machine that drifts from round to round does not move them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .statistics import RESAMPLES, SEED, interval

MARGIN = 0.02
"""Methods that differ by no more than this are as good as each other."""
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """One workload, measured with every method."""

    miss_rate: float  # New tokens over all tokens, T / (T + P)
    seconds: Mapping[str, Sequence[float]]  # Method -> samples; samples of one index are of one round
    chosen: str  # One of the methods


def judge(cells: Sequence[Cell]) -> dict[str, Any]:
    """The verdict over all cells.

    ``auto_right_share``: of the cells whose methods differ by more than 2%, those where the chosen one is the fastest;
    None if there is no such cell. ``auto_mean_regret``: mean over all cells of the chosen method's time over that of
    the fastest, less 1. ``auto_right_share_within_interval``: the same share, where a choice also counts as right if
    the interval of its regret reaches 0. ``wrong``: the cells where the choice was not the fastest and they differ.
    """
    if not cells:
        raise ValueError("no cells")
    differs, right, regret = (np.stack(each) for each in zip(*(_verdict(cell) for cell in cells), strict=True))
    drawn = (_verdict(cell, index) for index, cell in enumerate(cells))
    drawn_differs, drawn_right, drawn_regret = (np.stack(each) for each in zip(*drawn, strict=True))
    counts = drawn_differs.sum(axis=0)
    shares = ((drawn_differs & drawn_right).sum(axis=0) / np.maximum(counts, 1))[counts > 0]
    differing, mean = int(differs.sum()), float(regret.mean())
    share = float((differs & right).sum() / differing) if differing else None
    wrong: list[dict[str, Any]] = []
    for index, cell in enumerate(cells):
        if differs[index] and not right[index]:
            bounds = interval(float(regret[index, 0]), drawn_regret[index]).to_json()
            wrong.append({"miss_rate": cell.miss_rate, "chosen": cell.chosen, "regret": bounds})
    beyond = sum(entry["regret"]["low"] > 0 for entry in wrong)
    return {
        "auto_right_share": share,
        "auto_right_share_within_interval": None if share is None else 1 - beyond / differing,
        "auto_mean_regret": mean,
        "intervals": {
            "auto_right_share": None if share is None or not len(shares) else interval(share, shares).to_json(),
            "auto_mean_regret": interval(mean, drawn_regret.mean(axis=0)).to_json(),
        },
        "cells": len(cells),
        "differing_cells": differing,
        "wrong": wrong,
    }


def crossover(cells: Sequence[Cell], below: str = "pass_q", above: str = "pass_kv") -> dict[str, Any]:
    """The miss rate up to which one method is the faster, and from which on the other.

    It is where a rule with a single threshold loses least over all cells, and between two cells where the logarithm of
    their time ratio, taken as linear in that of the miss rate, is zero. ``value`` is None where one method is faster
    all along, which ``always`` then names; ``low``, ``high``: of the resamples that have one, 95%; ``share``: of the
    resamples, those that have one.
    """
    ordered = sorted(cells, key=lambda cell: cell.miss_rate)
    rates = np.log([cell.miss_rate for cell in ordered])
    value = _threshold(rates, np.array([_gain(cell, below, above) for cell in ordered])[:, 0])
    drawn = np.array([_gain(cell, below, above, index) for index, cell in enumerate(ordered)])
    crossings = np.array([_threshold(rates, column) for column in drawn.T])
    finite = crossings[np.isfinite(crossings)]
    bounds = interval(value, finite) if len(finite) else None
    result: dict[str, Any] = {
        "value": math.exp(value) if math.isfinite(value) else None,
        "low": None if bounds is None else math.exp(bounds.low),
        "high": None if bounds is None else math.exp(bounds.high),
        "share": len(finite) / len(crossings),
    }
    return result if math.isfinite(value) else {**result, "always": above if value < 0 else below}


def _verdict(cell: Cell, drawn: int | None = None) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Values]:
    """``[n]`` whether the methods differ, whether the chosen one is the fastest, and its regret."""
    medians = _medians(cell, drawn)
    fastest, second = np.partition(medians, 1, axis=0)[:2]
    regret = medians[list(cell.seconds).index(cell.chosen)] / fastest - 1
    return second / fastest > 1 + MARGIN, regret == 0, regret


def _medians(cell: Cell, drawn: int | None = None) -> Values:
    """``[methods, n]`` medians of the cell; or of whole rounds, drawn again and again for the cell of that number."""
    logs = np.log(np.array(list(cell.seconds.values()), dtype=np.float64))
    relative = np.exp(logs - logs.mean(axis=0))
    if drawn is None:
        return np.median(relative, axis=1)[:, None]
    count = relative.shape[1]
    rounds = np.random.default_rng([SEED, drawn]).integers(0, count, (RESAMPLES, count))
    return np.stack([np.median(times[rounds], axis=1) for times in relative])


def _gain(cell: Cell, below: str, above: str, drawn: int | None = None) -> Values:
    """Logarithm of the time ratio: positive where `below` is the faster."""
    medians = dict(zip(cell.seconds, _medians(cell, drawn), strict=True))
    gain: Values = np.log(medians[above] / medians[below])
    return gain


def _threshold(rates: Values, gains: Values) -> float:
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
