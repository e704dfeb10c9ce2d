"""The fitted empirical rule (context parallelism, Appendix D): ``h = alpha log T + beta log(T / (T + P)) + gamma``.

Pass-KV is preferred where h is positive. The published constants (-1.059, 1.145, 12.112) belong to one machine and, as
printed, prefer pass-Q for a full prefill of 128K tokens, against the same paper's text: none are shipped. ``megakv
fit-policy`` measures and fits them on the machine that will use them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megakv.costmodel.curves import Positive
from megakv.costmodel.hardware import Fingerprint
from megakv.costmodel.records import Record, load_record

RIDGE = 1e-3
NEWTON_STEPS = 100
CLEAR_DIFFERENCE = 0.02


class FitPoint(BaseModel):
    """Both methods timed at one (T, P)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    new: int = Field(ge=1)  # T and P of one sequence.
    cached: int = Field(ge=0)
    pass_kv_s: Positive  # Seconds of one attention layer.
    pass_q_s: Positive

    @property
    def advantage(self) -> float:
        """How much longer the slower method takes, relative to the faster; positive where pass-KV is the faster."""
        return (self.pass_q_s - self.pass_kv_s) / min(self.pass_q_s, self.pass_kv_s)


class PolicyFit(Record):
    """Constants of the rule with the points they were fitted to."""

    format: Literal["megakv policy fit"] = "megakv policy fit"
    version: Literal[1] = 1
    alpha: float = Field(allow_inf_nan=False)
    beta: float = Field(allow_inf_nan=False)
    gamma: float = Field(allow_inf_nan=False)
    fingerprint: Fingerprint  # Where the points were measured.
    ring_size: int = Field(ge=2)  # Context-parallel degree, and the layer of one rank.
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    # Share of the points on which the rule picks the faster method: of all, and of those that differ by over 2%.
    accuracy: float = Field(ge=0, le=1)
    clear_accuracy: float = Field(ge=0, le=1)
    points: tuple[FitPoint, ...] = Field(min_length=1)

    def h(self, new: int, cached: int) -> float:
        """Positive where pass-KV is preferred."""
        return empirical_rule((self.alpha, self.beta, self.gamma), new, cached)


def empirical_rule(constants: Sequence[float], new: int, cached: int) -> float:
    """``h`` of Appendix D, with natural logarithms."""
    alpha, beta, gamma = constants
    return alpha * math.log(new) + beta * math.log(new / (new + cached)) + gamma


def fit_constants(points: Sequence[FitPoint]) -> tuple[float, float, float]:
    """Logistic regression of the faster method on log T and log(T / (T + P)), weighted by the relative difference.

    A slight ridge keeps the constants finite where a line separates the points, or one method always wins.

    Raises ValueError: without a point.
    """
    if not points:
        raise ValueError("no (T, P) point was measured: allow more --seconds or smaller --tokens")
    features = np.array([[math.log(p.new), math.log(p.new / (p.new + p.cached)), 1.0] for p in points])
    wins = np.array([p.advantage > 0 for p in points], dtype=np.float64)
    weights = np.array([abs(p.advantage) for p in points])
    weights = weights / weights.mean() if weights.any() else np.ones(len(points))
    # Standardised columns make one ridge fit both logarithms.
    center, spread = features[:, :2].mean(0), features[:, :2].std(0)
    spread[spread == 0] = 1.0
    scaled = np.concatenate([(features[:, :2] - center) / spread, features[:, 2:]], axis=1)
    theta = np.zeros(3)
    for _ in range(NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(scaled @ theta, -50, 50)))
        gradient = scaled.T @ (weights * (chance - wins)) + RIDGE * theta
        curvature = (scaled.T * (weights * chance * (1 - chance))) @ scaled + RIDGE * np.eye(3)
        step = np.linalg.solve(curvature, gradient)
        theta -= step * min(1.0, 5.0 / float(np.abs(step).max() or 1.0))
        if np.abs(step).max() < 1e-10:
            break
    alpha, beta = theta[:2] / spread
    return float(alpha), float(beta), float(theta[2] - center @ (theta[:2] / spread))


def accuracies(constants: Sequence[float], points: Sequence[FitPoint]) -> tuple[float, float]:
    """Share of points on which the rule picks the faster method: of all, and of those that differ clearly."""

    def share(some: Sequence[FitPoint]) -> float:
        right = [(empirical_rule(constants, p.new, p.cached) > 0) == (p.advantage > 0) for p in some]
        return sum(right) / len(right) if right else 1.0

    return share(points), share([p for p in points if abs(p.advantage) > CLEAR_DIFFERENCE])


def load_fit(path: str, *, setting: str = "fit") -> PolicyFit:
    """Read and check a fit.

    Raises ValueError: as `megakv.costmodel.records.load_record`.
    """
    return load_record(PolicyFit, path, setting=setting, remedy="write a new one with megakv fit-policy --json FILE")
