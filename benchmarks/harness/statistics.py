"""Medians of samples and of ratios of paired samples, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES, CONFIDENCE, SEED = 10_000, 0.95, 0


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


def interval(value: float, resampled: NDArray[np.float64]) -> Interval:
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
