"""The lines of decode attention in FairKV (Section 3.2): seconds by the batch, and by the tokens that heads keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy.stats import linregress


@dataclass(frozen=True)
class LatencySample:
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

    def barrier_seconds(self, loads: Sequence[Sequence[float]], batch: int, kv_heads: int) -> float:
        """Attention time of one decoded token over all layers, each as slow as its slowest rank.

        loads: ``[layers][ranks]`` kept tokens of a sequence, summed over a rank's heads.
        kv_heads: heads of the rank that the samples were measured on, each with `budget` tokens.
        """
        return sum(self.over_tokens.at(batch * max(layer) / kv_heads) for layer in loads)


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Least squares; a ValueError where there are not two different values of x."""
    if len(xs) != len(ys) or len(set(xs)) < 2:
        raise ValueError(f"a line needs samples at two different values or more; got {sorted(set(xs))}")
    found = linregress(xs, ys)
    return Line(float(found.slope), float(found.intercept), float(found.rvalue**2) if len(set(ys)) > 1 else 1.0)


def fit_latency(samples: Iterable[LatencySample]) -> LatencyModel:
    """Fit the model; a ValueError where a sample is impossible, or there is nothing to fit a line to."""
    found = list(samples)
    by_budget, by_batch = defaultdict(list), defaultdict(list)
    for sample in found:
        if sample.batch < 1 or sample.budget < 1 or not 0 < sample.seconds < float("inf"):
            raise ValueError(f"{sample}: allowed: a batch and a budget of 1 or more, and finite seconds above 0")
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
