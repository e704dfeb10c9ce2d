"""The lines of decode attention in FairKV (Section 3.2): seconds by the batch, and by the tokens that heads keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LatencySample:
    """One measurement."""

    batch: int  # B, sequences decoded together.
    budget: int  # C, tokens kept per KV head.
    seconds: float  # L, of one token's attention at one layer.


@dataclass(frozen=True)
class Line:
    """L = slope x + intercept, by least squares."""

    slope: float  # alpha and beta over the batch, gamma and delta over the budget; seconds.
    intercept: float
    r_squared: float  # Part of the variance that the line explains.

    def at(self, x: float) -> float:
        """Seconds at x."""
        return self.slope * x + self.intercept


@dataclass(frozen=True)
class LatencyModel:
    """The lines of the paper's Figure 1, and one through all samples."""

    over_batch: dict[int, Line]  # For each budget, L = alpha B + beta.
    over_budget: dict[int, Line]  # For each batch, L = gamma C + delta.
    over_tokens: Line  # Over B C, the tokens that a KV head's rank reads: what both are where memory is the limit.

    def barrier_seconds(self, loads: Sequence[Sequence[float]], batch: int, kv_heads: int) -> float:
        """Attention time of one decoded token over all layers, each as slow as its slowest rank.

        loads: kept tokens of a sequence, summed over a rank's heads.
        kv_heads: heads of the rank that the samples were measured on, each with `budget` tokens.
        """
        return sum(self.over_tokens.at(batch * max(layer) / kv_heads) for layer in loads)


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Least squares.

    Raises ValueError: if there are not two different values of x.
    """
    if len(xs) != len(ys) or len(set(xs)) < 2:
        raise ValueError(f"a line needs samples at two different values or more; got {sorted(set(xs))}")
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    dx, dy = x - x.mean(), y - y.mean()
    slope = float(dx @ dy / (dx @ dx))
    intercept = float(y.mean() - slope * x.mean())
    rest, variance = float(((y - slope * x - intercept) ** 2).sum()), float(dy @ dy)
    return Line(slope, intercept, 1.0 if variance == 0 else 1 - rest / variance)


def fit_latency(samples: Iterable[LatencySample]) -> LatencyModel:
    """Fit the model to measurements.

    Budgets measured at one batch only have no line over the batch, and the other way round.

    Raises ValueError: if a sample is impossible, or no batch was measured at two budgets and no budget at two batches.
    """
    found = list(samples)
    for sample in found:
        if sample.batch < 1 or sample.budget < 1 or not 0 < sample.seconds < float("inf"):
            raise ValueError(f"{sample}: allowed: a batch and a budget of 1 or more, and finite seconds above 0")
    by_budget, by_batch = defaultdict(list), defaultdict(list)
    for sample in found:
        by_budget[sample.budget].append((sample.batch, sample.seconds))
        by_batch[sample.batch].append((sample.budget, sample.seconds))
    over_batch, over_budget = (
        {
            key: fit_line(*zip(*rows, strict=True))
            for key, rows in sorted(groups.items())
            if len({x for x, _ in rows}) > 1
        }
        for groups in (by_budget, by_batch)
    )
    if not over_batch and not over_budget:
        raise ValueError(f"{len(found)} samples, no two of them at one batch or one budget; nothing can be fitted")
    tokens = [sample.batch * sample.budget for sample in found]
    return LatencyModel(over_batch, over_budget, fit_line(tokens, [sample.seconds for sample in found]))
