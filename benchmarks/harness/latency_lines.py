"""The lines of decode attention in FairKV (Section 3.2): seconds by the batch, and by the tokens that heads keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy.stats import linregress


class LatencySample(NamedTuple):
    """Seconds L of one token's attention at one layer."""

    batch: int  # B, sequences decoded together.
    budget: int  # C, tokens kept per KV head.
    seconds: float


@dataclass(frozen=True)
class Line:
    """L = slope x + intercept in seconds, by least squares, and the part of the variance that it explains."""

    slope: float  # alpha over the batch, gamma over the budget.
    intercept: float  # beta over the batch, delta over the budget.
    r_squared: float

    def at(self, x: float) -> float:
        return self.slope * x + self.intercept


@dataclass(frozen=True)
class LatencyModel:
    """The lines of the paper's Figure 1, and one through all samples."""

    over_batch: dict[int, Line]  # For each budget, L = alpha B + beta.
    over_budget: dict[int, Line]  # For each batch, L = gamma C + delta.
    over_tokens: Line  # Over B C, the tokens that a KV head's rank reads: what both are where memory is the limit.


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    found = linregress(xs, ys)
    return Line(float(found.slope), float(found.intercept), float(found.rvalue**2) if len(set(ys)) > 1 else 1.0)


def fit_latency(samples: Sequence[LatencySample]) -> LatencyModel:
    """Of a grid of batches and budgets, two of each at least."""

    def lines(group: int, x: int) -> dict[int, Line]:
        groups = defaultdict(list)
        for sample in samples:
            groups[sample[group]].append((sample[x], sample.seconds))
        return {int(key): fit_line(*zip(*rows, strict=True)) for key, rows in sorted(groups.items())}

    tokens = [sample.batch * sample.budget for sample in samples]
    return LatencyModel(lines(1, 0), lines(0, 1), fit_line(tokens, [sample.seconds for sample in samples]))
