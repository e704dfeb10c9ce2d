"""One layer's KV heads on ranks: the largest first, then the slowest rank and another one divide their heads anew.

The same for all that a layer may be: no copies, replicas with equal shares (items that go to several places), and heads
cut between the ranks of a group (a place as fast as its ranks together). `Schemes` are the ways to copy or to group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megakv.cache.splitting import TOLERANCE

Criterion = Literal["slowest", "difference"]

ROWS, BEST = 2_048, 24
"""Drawn orders of heads over all schemes, where the sizes' own leaves room for better; how many are improved."""
NOISE, CLOSE = 0.5, 1e-3
"""Sigma of the factor by which an order takes sizes wrongly; the relative distance to a bound that is near enough."""
PAIR_HEADS = 10
"""Heads, the largest, that two places divide anew: all their subsets are tried."""
LEAST = 1e-8
"""Of all budgets together: what a head counts at least, so that no rank is left with nothing at all."""


@dataclass(frozen=True)
class Schemes:
    """Ways to place heads that are sorted by budget, the largest first.

    ``counts[scheme, head]`` places divide a head equally; a place has ``speeds[scheme, place]`` ranks. `complete`:
    whether these are all ways that there are.
    """

    counts: NDArray[np.int64]
    speeds: NDArray[np.int64]
    complete: bool = True


@dataclass(frozen=True)
class Placement:
    """Places of every head under the best scheme, its value by the criterion, and what no placement's is below."""

    scheme: int
    places: list[tuple[int, ...]]
    value: float
    bound: float


def positive(weights: Sequence[float]) -> list[float]:
    """The same with a little for heads that keep nothing."""
    total = sum(weights)
    least = total * LEAST if total > 0 else 1.0
    return [max(weight, least) for weight in weights]


def lower_bounds(sizes: NDArray[np.float64], schemes: Schemes, start: float = 0.0) -> NDArray[np.float64]:
    """[schemes]: a time that the slowest place cannot be below; `sizes` are those of single replicas, and every place
    has `start` without any.
    """
    fastest, places = schemes.speeds.max(axis=1), schemes.speeds.shape[1]
    ends = schemes.counts.cumsum(axis=1)
    replicas = np.arange(ends[:, -1].max())
    # [schemes, replicas]: the size of each, nothing where a scheme has fewer.
    head = (replicas[None, :, None] >= ends[:, None, :]).sum(axis=2)
    spread = np.take_along_axis(np.pad(sizes, ((0, 0), (0, 1))), head, axis=1)
    spread = -np.sort(-spread, axis=1)
    bounds = (spread.sum(axis=1) + start * places) / schemes.speeds.sum(axis=1)
    # Of the first kR + 1 replicas some place has k + 1.
    for k in range((len(replicas) - 1) // places + 1):
        bounds = np.maximum(bounds, (spread[:, k * (places - 1) : k * places + 1].sum(axis=1) + start) / fastest)
    return bounds


def largest_first(
    sizes: NDArray[np.float64], schemes: Schemes, order: NDArray[np.int64], start: float = 0.0
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Heads one after the other, in an order [schemes, heads], to the places that are then fastest, of every scheme at
    once: the time of places [schemes, places], and who is where [schemes, heads, places].
    """
    rows, heads = sizes.shape
    places = schemes.speeds.shape[1]
    loads = np.full((rows, places), start)
    held = np.zeros((rows, heads, places), dtype=bool)
    row = np.arange(rows)
    rank = np.arange(places)
    for step in range(heads):
        head = order[:, step]
        size = sizes[row, head]
        first = np.argsort((loads + size[:, None]) / schemes.speeds, axis=1, kind="stable")
        chosen = np.zeros((rows, places), dtype=bool)
        np.put_along_axis(chosen, first, rank < schemes.counts[row, head][:, None], axis=1)
        loads += chosen * size[:, None]
        held[row, head] = chosen
    return loads / schemes.speeds, held


@cache
def _subsets(count: int) -> NDArray[np.bool_]:
    return (np.arange(1 << count)[:, None] >> np.arange(count) & 1).astype(bool)


def _value(times: NDArray[np.float64], criterion: Criterion) -> NDArray[np.float64]:
    """By the last axis: the slowest place's time, or by how much it is above that of the emptiest one."""
    highest: NDArray[np.float64] = times.max(axis=-1)
    return highest if criterion == "slowest" else highest - times.min(axis=-1)


def rebalance(
    sizes: NDArray[np.float64],
    speeds: NDArray[np.int64],
    held: NDArray[np.bool_],
    start: float = 0.0,
    criterion: Criterion = "slowest",
    enough: float = 0.0,
) -> NDArray[np.bool_]:
    """Divide what the slowest place and another one hold anew, in the best way, until that is enough or helps no more;
    [heads, places].

    By differences, the emptiest place and another one, too.
    """
    held = held.copy()
    while True:
        loads = sizes @ held + start
        times = loads / speeds
        value, step = float(_value(times, criterion)), None
        if value <= enough:
            return held
        best = value * (1 - TOLERANCE)
        for one in {int(times.argmax()), *([int(times.argmin())] if criterion == "difference" else [])}:
            for other in range(len(speeds)):
                (moved,) = (held[:, one] != held[:, other]).nonzero()
                if not len(moved):
                    continue
                if len(moved) > PAIR_HEADS:
                    moved = moved[(-sizes[moved]).argsort(kind="stable")[:PAIR_HEADS]]
                weights, subsets = sizes[moved], _subsets(len(moved))
                mine = subsets @ weights
                first = (loads[one] - weights @ held[moved, one] + mine) / speeds[one]
                second = (loads[other] - weights @ ~held[moved, one] + weights.sum() - mine) / speeds[other]
                values = np.maximum(first, second)
                if criterion == "difference":
                    rest = [time for place, time in enumerate(times.tolist()) if place not in (one, other)]
                    lowest = np.minimum(np.minimum(first, second), min(rest, default=inf))
                    values = np.maximum(values, max(rest, default=0.0)) - lowest
                least = values.argmin()
                if values[least] < best:
                    best, step = values[least], (moved, one, other, subsets[least])
        if step is None:
            return held
        moved, one, other, taken = step
        held[moved, one], held[moved, other] = taken, ~taken


def assign(
    weights: Sequence[float],
    schemes: Schemes,
    *,
    fixed: float = 0.0,
    start: float = 0.0,
    criterion: Criterion = "slowest",
) -> Placement:
    """Place heads, positive and the largest first, so that the slowest place is fastest, or so that places, all as
    fast, have the smallest difference between the fullest and the emptiest of them.

    Each replica takes `fixed` beside its part of the weight, and each place `start`, which may be negative, beside its
    replicas. Nearly always within 1% of the optimum; the bound says how far from it the value can be.
    """
    sizes = np.asarray(weights) / schemes.counts + fixed
    bounds = lower_bounds(sizes, schemes, start)
    places = schemes.speeds.shape[1]
    if not schemes.complete:
        # Of schemes that are not here nothing else is known.
        bounds = np.full(len(bounds), (sum(weights) + fixed * len(weights) + start * places) / schemes.speeds[0].sum())
    if criterion == "difference":
        assert not fixed and not start
        bounds = np.maximum(0.0, bounds - sum(weights) / places) * places / max(1, places - 1)
    lowest = float(bounds.min())
    enough = lowest + CLOSE * sum(weights) / places
    best, found = inf, (0, np.zeros((len(weights), places), dtype=bool))
    random, rows = np.random.default_rng(0), np.arange(len(sizes))
    for noise in (0.0, NOISE):
        if noise:
            # Again and again those that had the best places in the sizes' own order.
            rows = np.resize(rows[bounds[rows] < best * (1 - TOLERANCE)], ROWS)
        wrong = np.exp(noise * random.standard_normal((len(rows), len(weights))))
        order = np.argsort(-sizes[rows] * wrong, axis=1, kind="stable")
        times, held = largest_first(sizes[rows], Schemes(schemes.counts[rows], schemes.speeds[rows]), order, start)
        # Orders that differ may lead to the same places.
        distinct = np.unique((_value(times, criterion) / sum(weights)).round(9), return_index=True)[1]
        for row in distinct[:BEST]:
            scheme = rows[row]
            if best > enough and bounds[scheme] < best * (1 - TOLERANCE):
                placed = rebalance(sizes[scheme], schemes.speeds[scheme], held[row], start, criterion, enough)
                value = float(_value((sizes[scheme] @ placed + start) / schemes.speeds[scheme], criterion))
                if value < best:
                    best, found = value, (int(scheme), placed)
        if best <= enough:
            break
        rows = rows[np.argsort(_value(times, criterion), kind="stable")]
    return Placement(found[0], [tuple(np.flatnonzero(row).tolist()) for row in found[1]], best, min(best, lowest))
