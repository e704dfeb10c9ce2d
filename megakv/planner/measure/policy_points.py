"""The fitted rule: pass-KV timed against pass-Q on one attention layer, in turns, and constants from these points."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

from megakv.base.device import settle_allocator
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.hardware import fingerprint
from megakv.costmodel.shape import AttentionShape
from megakv.costmodel.stopwatch import Pool, slowest, timed
from megakv.distributed.comm import Communicator
from megakv.forward.policy_fit import FitPoint, PolicyFit, empirical_rule
from megakv.planner.measure.trial import TrialLayer

MISS_RATES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0)
RIDGE = 1e-3
CLEAR_DIFFERENCE = 0.02
LEAST_PAIRS = 3
MOST_PAIRS = 25
PATIENCE = 3
"""A point whose least pairs would take this many times its share of the time is left out."""


def grid(totals: Sequence[int], ring: int) -> list[tuple[int, int]]:
    """(T, P) at fixed T + P, short new parts first; passes so short that they go the way of decoding are not in it."""
    points = {(max(1, round(total * rate)), total) for total in totals for rate in MISS_RATES}
    return sorted((new, total - new) for new, total in points if new >= 2 * ring)


def _time_pair(trial: TrialLayer, budget_s: float) -> tuple[float, float] | None:
    """Medians of the slowest rank's seconds of both methods, run in turns; None if they take too long."""
    calls = [partial(trial.run, method) for method in ("pass_kv", "pass_q")]
    for call in calls:
        call()
    first = sum(slowest(trial.comm, [timed(call) for call in calls]))
    if LEAST_PAIRS * first > PATIENCE * budget_s:
        return None
    samples: list[list[float]] = [[], []]
    for index in range(min(MOST_PAIRS, max(LEAST_PAIRS, int(budget_s / first)))):
        # The order alternates, so that neither method always runs in the other's wake.
        for which in (0, 1) if index % 2 else (1, 0):
            trial.comm.barrier()
            samples[which].append(timed(calls[which]))
    pass_kv, pass_q = (statistics.median(slowest(trial.comm, times)) for times in samples)
    return pass_kv, pass_q


def fit_policy(
    comm: Communicator,
    shape: AttentionShape,
    *,
    dtype: torch.dtype,
    totals: Sequence[int],
    seconds: float,
    report: Callable[[int], None] | None = None,
) -> PolicyFit:
    """Time both methods at every point that fits in about so many seconds, and fit the rule. Every rank must call it.

    shape: the layer on one rank. totals: the values of T + P. report: called with the number of all points.
    Raises ValueError if there is no ring, or no point could be measured in the time.
    """
    ring = comm.mesh.cp_size
    if ring < 2:
        raise ValueError(f"a fit needs 2 or more context-parallel ranks, not {ring}")
    settle_allocator()
    pool = Pool(dtype, comm.mesh.device)
    wanted, points = grid(totals, ring), []
    for new, cached in wanted:
        trial = TrialLayer(comm, shape, Workload((new,), (cached,), ring), pool=pool)
        times = _time_pair(trial, seconds / len(wanted))
        if times is not None:
            points.append(FitPoint(new=new, cached=cached, pass_kv_s=times[0], pass_q_s=times[1]))
        if report is not None:
            report(len(wanted))
    constants = fit_constants(points)
    accuracy, clear_accuracy = accuracies(constants, points)
    return PolicyFit(
        alpha=constants[0],
        beta=constants[1],
        gamma=constants[2],
        fingerprint=fingerprint(comm, dtype),
        ring_size=ring,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.key_dim,
        accuracy=accuracy,
        clear_accuracy=clear_accuracy,
        points=tuple(points),
    )


def fit_constants(points: Sequence[FitPoint]) -> tuple[float, float, float]:
    """Logistic regression of the faster method on log T and log(T / (T + P)), weighted by the relative difference.

    A slight ridge keeps the constants finite where a line separates the points, or one method always wins.
    """
    if not points:
        raise ValueError("no (T, P) point was measured: allow more --seconds or smaller --tokens")
    features = np.log([[p.new, p.new / (p.new + p.cached)] for p in points])
    advantages = np.array([p.advantage for p in points])
    wins, weights = advantages > 0, np.abs(advantages)
    weights = weights / weights.mean() if weights.any() else np.ones(len(points))
    # Standardised columns make one ridge fit both logarithms.
    center, spread = features.mean(0), features.std(0)
    spread[spread == 0] = 1.0
    scaled = np.column_stack([(features - center) / spread, np.ones(len(points))])

    def loss(theta: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        scores = scaled @ theta
        value = weights @ (np.logaddexp(0.0, scores) - wins * scores) + RIDGE / 2 * theta @ theta
        return float(value), scaled.T @ (weights * (expit(scores) - wins)) + RIDGE * theta

    theta = minimize(loss, np.zeros(3), jac=True, method="BFGS", options={"gtol": 1e-10}).x
    alpha, beta = theta[:2] / spread
    return float(alpha), float(beta), float(theta[2] - center @ (theta[:2] / spread))


def accuracies(constants: Sequence[float], points: Sequence[FitPoint]) -> tuple[float, float]:
    """Share of points on which the rule picks the faster method: of all, and of those that differ clearly."""

    def share(some: Sequence[FitPoint]) -> float:
        right = [(empirical_rule(constants, p.new, p.cached) > 0) == (p.advantage > 0) for p in some]
        return sum(right) / len(right) if right else 1.0

    return share(points), share([p for p in points if abs(p.advantage) > CLEAR_DIFFERENCE])
