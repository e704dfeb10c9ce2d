"""Medians of samples and of ratios of paired samples, with bootstrap intervals."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 0


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% bootstrap interval; of a single sample, a point."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """The same times a positive number."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def to_json(self) -> dict[str, float]:
        """As it stands in the results."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median(samples: ArrayLike) -> Interval:
    """Median of samples."""
    values = _checked(samples)
    return interval(float(np.median(values)), np.median(values[_rounds(len(values))], axis=1))


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Interval:
    """Ratio of two medians whose samples are pairs: whole rounds are resampled."""
    above, below = _checked(numerator), _checked(denominator)
    if len(above) != len(below):
        raise ValueError(f"{len(above)} and {len(below)} samples are no pairs")
    rounds = _rounds(len(above))
    resampled = np.median(above[rounds], axis=1) / np.median(below[rounds], axis=1)
    return interval(float(np.median(above) / np.median(below)), resampled)


def paired_ratio(numerator: ArrayLike, denominator: ArrayLike) -> Interval:
    """Median of the ratios within each round, which a machine that drifts from round to round does not move."""
    above, below = _checked(numerator), _checked(denominator)
    if len(above) != len(below):
        raise ValueError(f"{len(above)} and {len(below)} samples are no pairs")
    return median(above / below)


def unpaired_ratio(numerator: ArrayLike, denominator: ArrayLike) -> Interval:
    """Ratio of two medians of independent samples, as of runs that follow each other: each is resampled by itself."""
    above, below = _checked(numerator), _checked(denominator)
    rng = np.random.default_rng(SEED)
    tops, bottoms = (
        np.median(values[rng.integers(0, len(values), (RESAMPLES, len(values)))], axis=1) for values in (above, below)
    )
    return interval(float(np.median(above) / np.median(below)), tops / bottoms)


def _checked(samples: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("no samples")
    return values


def _rounds(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(SEED).integers(0, count, (RESAMPLES, count))


def interval(value: float, resampled: NDArray[np.float64]) -> Interval:
    """An estimate with the middle 95% of its resamples."""
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))
