"""Measurements: each is made once, and repeated ones say how noisy they are."""

import random

import pytest

from megakv.runahead.trials import MOST_NOISE, USUAL_NOISE, Trial, Trials


def test_known_ones_are_not_measured_again() -> None:
    asked: list[tuple[int, ...]] = []

    def evaluate(partition: tuple[int, ...]) -> float:
        asked.append(partition)
        return 5.0

    told: list[tuple[Trial, int]] = []
    known = [Trial(partition=(3, 1), seconds=seconds, stride=0, round=index) for index, seconds in enumerate((1, 4))]
    trials = Trials(evaluate, known, lambda trial, left: told.append((trial, left)))
    for left in (3, 2, 1, 0):
        trials.add((3, 1), 2, left)
    assert asked == [(3, 1), (3, 1)] and trials.times == {(3, 1): [1.0, 4.0, 5.0, 5.0]}
    assert trials.seconds == {(3, 1): 4.5}
    assert [trial for trial, _ in told] == trials.made and [left for _, left in told] == [3, 2, 1, 0]
    assert [trial.round for trial in trials.made] == [0, 1, 2, 3]


def test_noise_is_that_of_repeated_measurements() -> None:
    noise = random.uniform(0.005, 0.05)
    trials = Trials(lambda partition: random.gauss(1, noise))
    assert trials.noise() == pytest.approx(USUAL_NOISE)
    for partition in range(200):
        trials.add((partition, 1), 0, 0)
    assert trials.noise() == pytest.approx(USUAL_NOISE), "none was measured twice"
    for partition in range(200):
        trials.add((partition, 1), 0, 0)
    assert trials.noise() == pytest.approx(noise, rel=0.25)


def test_a_stretch_of_other_work_is_not_taken_for_noise() -> None:
    times = iter([1.0, 9.0])
    trials = Trials(lambda partition: next(times))
    trials.add((1, 1), 0, 0)
    trials.add((1, 1), 0, 0)
    assert trials.noise() < MOST_NOISE
