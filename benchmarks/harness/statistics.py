"""Medians of samples and of ratios of paired samples, with bootstrap intervals; how good choices were."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES, CONFIDENCE, SEED = 10_000, 0.95, 0
MARGIN = 0.02  # Methods that differ by no more than this are as good as each other
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% bootstrap interval; of a single sample, a point."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, known: Any) -> Interval:
        """An interval, or one as JSON; the median of samples; or a number that is known."""
        if isinstance(known, Mapping):
            return cls(known["value"], known["low"], known["high"])
        if isinstance(known, int | float):
            return cls(known, known, known)
        return known if isinstance(known, Interval) else median(known)

    def scaled(self, factor: float) -> Interval:
        """The same times a positive number."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median(samples: ArrayLike) -> Interval:
    return _bootstrap(lambda drawn: np.median(drawn, -1), samples)


def ratio(numerator: ArrayLike, denominator: ArrayLike, *, paired: bool = True) -> Interval:
    """Ratio of two medians; whole rounds are resampled, or each by itself where samples are no pairs."""
    return _bootstrap(lambda a, b: np.median(a, -1) / np.median(b, -1), numerator, denominator, paired=paired)


def paired_ratio(numerator: ArrayLike, denominator: ArrayLike) -> Interval:
    """Median of the ratios within each round, which a machine that drifts from round to round does not move."""
    return _bootstrap(lambda a, b: np.median(a / b, -1), numerator, denominator)


def interval(value: float, resampled: Values) -> Interval:
    """An estimate with the middle 95% of its resamples."""
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))


def _bootstrap(estimate: Callable[..., Any], *samples: ArrayLike, paired: bool = True) -> Interval:
    values = [np.asarray(each, dtype=np.float64) for each in samples]
    counts = [len(each) for each in values]
    if not all(counts):
        raise ValueError("no samples")
    if paired and len(set(counts)) > 1:
        raise ValueError(f"{' and '.join(map(str, counts))} samples are no pairs")
    rng = np.random.default_rng(SEED)
    drawn = [rng.integers(0, count, (RESAMPLES, count)) for count in (counts[:1] if paired else counts)]
    rounds = drawn * len(values) if paired else drawn
    resampled = estimate(*(each[index] for each, index in zip(values, rounds, strict=True)))
    return interval(float(estimate(*values)), resampled)


@dataclass(frozen=True)
class Case:
    """One workload, measured with every method."""

    miss_rate: float  # New tokens over all tokens, T / (T + P)
    seconds: Mapping[str, Sequence[float]]  # Method -> samples; samples of one index are of one round
    chosen: str  # One of the methods


def judge(cases: Sequence[Case]) -> dict[str, Any]:
    """How often the choice was the fastest of the cases that differ, and the mean of its regret over all of them."""
    if not cases:
        raise ValueError("no cases")
    differs, right, regret = (np.stack(each) for each in zip(*map(_verdict, cases), strict=True))
    drawn = (_verdict(case, index) for index, case in enumerate(cases))
    drawn_differs, drawn_right, drawn_regret = (np.stack(each) for each in zip(*drawn, strict=True))
    counts = drawn_differs.sum(axis=0)
    shares = ((drawn_differs & drawn_right).sum(axis=0) / np.maximum(counts, 1))[counts > 0]
    differing, mean = int(differs.sum()), float(regret.mean())
    share = float((differs & right).sum() / differing) if differing else None
    wrong: list[dict[str, Any]] = []
    for index in np.flatnonzero(differs & ~right):
        bounds = interval(float(regret[index, 0]), drawn_regret[index]).to_json()
        wrong.append({"miss_rate": cases[index].miss_rate, "chosen": cases[index].chosen, "regret": bounds})
    beyond = sum(entry["regret"]["low"] > 0 for entry in wrong)
    return {
        "auto_right_share": share,
        "auto_right_share_within_interval": None if share is None else 1 - beyond / differing,
        "auto_mean_regret": mean,
        "intervals": {
            "auto_right_share": None if share is None or not len(shares) else interval(share, shares).to_json(),
            "auto_mean_regret": interval(mean, drawn_regret.mean(axis=0)).to_json(),
        },
        "cells": len(cases),
        "differing_cells": differing,
        "wrong": wrong,
    }


def crossover(cases: Sequence[Case], below: str = "pass_q", above: str = "pass_kv") -> dict[str, Any]:
    """The miss rate at which a rule with a single threshold between two methods loses least over all cases."""
    ordered = sorted(cases, key=lambda case: case.miss_rate)
    rates = np.log([case.miss_rate for case in ordered])
    value = _threshold(rates, np.array([_gain(case, below, above)[0] for case in ordered]))
    drawn = np.array([_gain(case, below, above, index) for index, case in enumerate(ordered)])
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


def _verdict(case: Case, drawn: int | None = None) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Values]:
    """``[n]`` whether the methods differ, whether the chosen one is the fastest, and its regret."""
    medians = _medians(case, drawn)
    fastest, second = np.partition(medians, 1, axis=0)[:2]
    regret = medians[list(case.seconds).index(case.chosen)] / fastest - 1
    return second / fastest > 1 + MARGIN, regret == 0, regret


def _medians(case: Case, drawn: int | None = None) -> Values:
    """``[methods, n]`` medians of the case; or of whole rounds, drawn again and again for the case of that number."""
    logs = np.log(np.array(list(case.seconds.values()), dtype=np.float64))
    relative = np.exp(logs - logs.mean(axis=0))
    if drawn is None:
        return np.median(relative, axis=1)[:, None]
    count = relative.shape[1]
    rounds = np.random.default_rng([SEED, drawn]).integers(0, count, (RESAMPLES, count))
    return np.stack([np.median(times[rounds], axis=1) for times in relative])


def _gain(case: Case, below: str, above: str, drawn: int | None = None) -> Values:
    """Logarithm of the time ratio: positive where `below` is the faster."""
    medians = dict(zip(case.seconds, _medians(case, drawn), strict=True))
    gain: Values = np.log(medians[above] / medians[below])
    return gain


def _threshold(rates: Values, gains: Values) -> float:
    """The best threshold on an ascending axis; infinite where one side is always better."""
    # Gain of the rule with the first k cases below the threshold.
    totals = 2 * np.concatenate([[0.0], np.cumsum(gains)]) - gains.sum()
    best = int(np.argmax(totals))
    if best == 0:
        return float("-inf")
    if best == len(gains):
        return float("inf")
    # At the best k, the case before gains and the one after loses.
    left, right = gains[best - 1], gains[best]
    share = left / (left - right) if left > right else 0.5
    return float(rates[best - 1] + share * (rates[best] - rates[best - 1]))
