"""Rates are fitted to what steps took: exactly where steps differ, by doubt where not, whatever is disturbed."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import nnls

from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import Fingerprint, HostProfile
from megakv.offload.link import Traffic
from megakv.offload.method import Plan, Split
from megakv.offload.rates import STEPS, Rates, fitted, nonnegative_least_squares
from megakv.offload.record import StepRecord


@pytest.mark.parametrize("seed", range(60))
def test_least_squares_are_those_of_scipy(seed: int) -> None:
    generator = np.random.default_rng(seed)
    matrix = generator.uniform(-1, 1, (generator.integers(1, 9), generator.integers(1, 4)))
    values = generator.uniform(-1, 1, len(matrix))
    expected, off = nnls(matrix, values)
    found = nonnegative_least_squares(matrix, values)
    assert min(found) >= 0 and np.linalg.norm(matrix @ found - values) == pytest.approx(off, rel=1e-6, abs=1e-9)
    assert len(matrix) < len(expected) or found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_rates_of_steps_that_differ_are_found(seed: int) -> None:
    generator = random.Random(seed)
    profile = {"recompute_s": 10 ** generator.uniform(-8, -4), "launch_s": 10 ** generator.uniform(-6, -3)}
    true = {name: rate * generator.uniform(0.3, 3) for name, rate in profile.items()}
    steps = []
    for _ in range(STEPS):
        # Of which each rate is a part that can be seen.
        work = {name: generator.uniform(1, 9) / rate for name, rate in profile.items()}
        steps.append((work, sum(work[name] * rate for name, rate in true.items())))
    assert fitted(steps, profile) == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_what_steps_of_one_kind_took_is_shared_by_what_it_can_be_due_to(seed: int) -> None:
    generator = random.Random(seed)
    profile = {"recompute_s": 1.0, "launch_s": 1.0}
    work = {name: 10 ** generator.uniform(-6, -2) for name in profile}
    expected = sum(work.values())
    assert fitted([(work, expected)] * STEPS, profile) == pytest.approx(profile)
    for factor in (0.01, 0.3, 1.5, 10.0):
        found = fitted([(work, factor * expected)] * STEPS, profile)
        assert min(found.values()) >= 0
        assert sum(work[name] * rate for name, rate in found.items()) == pytest.approx(factor * expected, rel=0.1)
    # Few tokens: what was waited for, not memory. Many: the other way round.
    few = fitted([({"recompute_s": 5e-5, "launch_s": 1e-4}, 6e-4)] * STEPS, profile)
    assert few == pytest.approx({"recompute_s": 1.0, "launch_s": 5.5}, rel=0.2)
    many = fitted([({"recompute_s": 1e-2, "launch_s": 1e-4}, 2e-2)] * STEPS, profile)
    assert many == pytest.approx({"recompute_s": 2.0, "launch_s": 1.0}, rel=0.2)
    # A rate that the profile lacks is what steps show.
    assert fitted([({"device_s": 4}, 2.0)], profile) == pytest.approx({"device_s": 0.5})


def step(*, elapsed_s: float, link_bytes_s: float) -> StepRecord:
    """A step of 1,000 cached tokens of one sequence, all of them sent."""
    record = StepRecord(cached=1000, new=1, plan=Plan("stream", (Split(1000),), 1.0, 1.0))
    nbytes = 2 * 1000 * 64
    record.elapsed_s, record.traffic = elapsed_s, Traffic(timed_bytes=nbytes, busy_s=nbytes / link_bytes_s)
    record.waited_s, record.attend_s = 0.5 * elapsed_s, 0.1 * elapsed_s
    return record


def test_disturbed_steps_are_not_believed_and_a_slower_link_is() -> None:
    here = Fingerprint(
        processor="", accelerator="cpu", cores=1, threads=1, hosts=1, ranks=1, torch_version="", dtype="float32"
    )
    profile = HostProfile(fingerprint=here, host_link=Curve.affine(1e-6, 1e7))
    profiler: Any = SimpleNamespace(sharers=1, profile=lambda *_: profile)
    store: Any = SimpleNamespace(input_bytes=0, row_bytes=64, input_width=0, row_width=16, lengths=lambda: [1000])
    rates = Rates(profiler)
    rates.prices(store, None, None)
    for _ in range(5):
        rates.learn(step(elapsed_s=0.1, link_bytes_s=1e7), 2)
    before = rates.prices(store, None, None)
    assert before.kv_s == pytest.approx(64 / 1e7, rel=0.01) and before.device_s > 0
    rates.learn(step(elapsed_s=0.9, link_bytes_s=1e5), 2)
    after = rates.prices(store, None, None)
    assert after.kv_s == pytest.approx(before.kv_s, rel=0.1) and after.device_s == pytest.approx(
        before.device_s, rel=0.1
    )
    for _ in range(STEPS):
        rates.learn(step(elapsed_s=0.1, link_bytes_s=1e6), 2)
    assert rates.prices(store, None, None).kv_s == pytest.approx(64 / 1e6, rel=0.1)
