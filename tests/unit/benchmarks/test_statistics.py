"""Medians and ratios of paired samples, with their intervals."""

import random

import numpy as np
import pytest

from benchmarks.harness.statistics import Interval, median, ratio


def test_a_constant_ratio_survives_any_noise_of_the_machine() -> None:
    slow = np.random.default_rng(random.getrandbits(32)).uniform(1, 100, 9)
    found = ratio(3 * slow, slow)
    assert [found.value, found.low, found.high] == pytest.approx([3, 3, 3])


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(11)
    covered = 0
    for _ in range(100):
        round_noise = rng.uniform(1, 2, 15)
        found = ratio(1.5 * round_noise * rng.normal(1, 0.05, 15), round_noise * rng.normal(1, 0.05, 15))
        assert found.low <= found.value <= found.high
        covered += found.low <= 1.5 <= found.high
    assert covered >= 88


def test_median_and_its_interval_lie_among_the_samples() -> None:
    samples = [5.0, 1.0, 9.0, 2.0, 3.0]
    found = median(samples)
    assert found.value == 3.0
    assert 1.0 <= found.low < 3.0 < found.high <= 9.0


def test_one_sample_is_a_point() -> None:
    assert median([0.25]) == Interval(0.25, 0.25, 0.25)
    assert ratio([3.0], [2.0]).scaled(0.5).to_json() == {"value": 0.75, "low": 0.75, "high": 0.75}


def test_same_samples_give_the_same_interval() -> None:
    samples = np.random.default_rng(random.getrandbits(32)).uniform(1, 2, (2, 7))
    assert ratio(*samples) == ratio(*samples)


@pytest.mark.parametrize(("numerator", "denominator"), [([], []), ([1.0, 2.0], [1.0])])
def test_samples_that_are_no_pairs_are_refused(numerator: list[float], denominator: list[float]) -> None:
    with pytest.raises(ValueError, match="samples"):
        ratio(numerator, denominator)


def test_ratio_of_independent_samples() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(60):
        found = ratio(2 * rng.normal(1, 0.1, 12), rng.normal(1, 0.1, 9), paired=False)
        assert found.low <= found.value <= found.high
        covered += found.low <= 2 <= found.high
    assert covered >= 52
