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

    def medians(self, drawn: int) -> Values:
        """``[methods, 1 + n]`` medians, and such of whole rounds, drawn again and again for the case of that number."""
        logs = np.log(np.array(list(self.seconds.values()), dtype=np.float64))
        relative = np.exp(logs - logs.mean(axis=0))
        count = relative.shape[1]
        rounds = np.random.default_rng([SEED, drawn]).integers(0, count, (RESAMPLES, count))
        return np.stack([[np.median(times), *np.median(times[rounds], axis=1)] for times in relative])


def judge(cases: Sequence[Case]) -> dict[str, Any]:
    """How often the choice was the fastest of the cases that differ, and the mean of its regret over all of them."""
    if not cases:
        raise ValueError("no cases")
    right, regrets = [], []
    for number, case in enumerate(cases):
        medians = case.medians(number)
        fastest, second = np.partition(medians, 1, axis=0)[:2]
        regrets.append(medians[list(case.seconds).index(case.chosen)] / fastest - 1)
        if second[0] / fastest[0] > 1 + MARGIN:
            right.append(regrets[-1][0] == 0)
    mean, *drawn = np.mean(regrets, axis=0)
    return {
        "auto_right_share": sum(right) / len(right) if right else None,
        "auto_mean_regret": float(mean),
        "intervals": {"auto_mean_regret": interval(float(mean), np.array(drawn)).to_json()},
        "cells": len(cases),
        "differing_cells": len(right),
    }


def crossover(cases: Sequence[Case], below: str = "pass_q", above: str = "pass_kv") -> dict[str, Any]:
    """The miss rate at which a rule with a single threshold between two methods loses least over all cases."""
    ordered = sorted(cases, key=lambda case: case.miss_rate)
    rates, gains = np.log([case.miss_rate for case in ordered]), []
    for number, case in enumerate(ordered):
        medians = dict(zip(case.seconds, case.medians(number), strict=True))
        # Positive where `below` is the faster.
        gains.append(np.log(medians[above] / medians[below]))
    value, *drawn = (_threshold(rates, column) for column in np.transpose(gains))
    finite = np.array(drawn)[np.isfinite(drawn)]
    if not math.isfinite(value):
        return {"value": None, "low": None, "high": None, "always": above if value < 0 else below}
    return {name: math.exp(end) for name, end in interval(value, finite).to_json().items()}


def _threshold(rates: Values, gains: Values) -> float:
    """The best threshold on an ascending axis; infinite where one side is always better."""
    # Gain of the rule with the first k cases below the threshold.
    totals = 2 * np.concatenate([[0.0], np.cumsum(gains)]) - gains.sum()
    best = int(np.argmax(totals))
    if best in (0, len(gains)):
        return float("-inf") if best == 0 else float("inf")
    # At the best k, the case before gains and the one after loses.
    left, right = gains[best - 1], gains[best]
    share = left / (left - right) if left > right else 0.5
    return float(rates[best - 1] + share * (rates[best] - rates[best - 1]))
