"""The prediction knows a chain from few measurements, and what noise did to them."""

import random

import numpy as np
import pytest

from megakv.runahead.grid import Grid
from megakv.runahead.prediction import Prediction
from tests.unit.runahead.chains import SimulatedChain

GRID = Grid(8192, 4, 64)
NOISE = 0.03


def measured(chain: SimulatedChain, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Bounds ``[n, 3]`` and true seconds ``[n]`` of some partitions, most of them near a good one."""
    balances = np.array([GRID.bounds(GRID.balance(share)) for share in np.linspace(-0.5, 0.9, 15)])
    truth = chain.seconds(np.diff(balances, axis=1, prepend=0, append=GRID.tokens))
    near = GRID.around(balances[truth.argmin()], 2 * GRID.unit)
    bounds = np.unique(np.concatenate([balances, rng.permutation(near)[:40]]), axis=0)
    return bounds, chain.seconds(np.diff(bounds, axis=1, prepend=0, append=GRID.tokens))


def any_chain() -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """`measured` of a chain, and its random numbers."""
    rng = np.random.default_rng(random.getrandbits(32))
    return *measured(SimulatedChain.usual(8192, random.Random(random.getrandbits(32))), rng), rng


def test_all_measurements_together_say_more_than_each() -> None:
    alone, together = [], []
    for _ in range(15):
        bounds, truth, rng = any_chain()
        noisy = truth * (1 + NOISE * rng.standard_normal(len(truth)))
        # Something else ran on the machine.
        noisy[rng.integers(len(noisy))] *= 1.3
        prediction = Prediction(GRID)
        prediction.fit(bounds, noisy.tolist(), GRID.unit, noisy=True)
        near = truth <= 1.1 * truth.min()
        alone.append(np.abs(noisy / truth - 1)[near].mean())
        together.append(np.abs(prediction.seconds(bounds) / truth - 1)[near].mean())
    assert np.mean(together) < 0.8 * np.mean(alone)


def test_exact_times_are_believed() -> None:
    bounds, truth, _ = any_chain()
    prediction = Prediction(GRID)
    prediction.fit(bounds, truth.tolist(), GRID.unit)
    assert prediction.seconds(bounds) == pytest.approx(truth, rel=0.01)


def test_a_time_that_was_taken_often_counts_for_more() -> None:
    apart = []
    for _ in range(10):
        bounds, truth, rng = any_chain()
        shifted = truth * (1 + NOISE * rng.standard_normal(len(truth)))
        best = int(truth.argmin())
        shifted[best] *= 0.9
        found = []
        for more in (0, 20):
            prediction = Prediction(GRID)
            again = np.repeat(bounds[[best]], more, axis=0)
            times = [*shifted, *[shifted[best]] * more]
            prediction.fit(np.concatenate([bounds, again]), times, GRID.unit, noisy=True)
            found.append(abs(prediction.seconds(bounds[[best]])[0] / shifted[best] - 1))
        apart.append(found)
    once, often = np.mean(apart, axis=0)
    assert often < once
