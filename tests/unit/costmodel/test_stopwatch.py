"""What is made of samples: deciles, ranks that wait for each other, and cold numbers."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakv.costmodel.stopwatch import LEAST_ROUNDS, ROUNDS, Case, Cases, Pool, lower_decile, rising


class Alone:
    """A communicator of one rank."""

    def __init__(self) -> None:
        self.mesh = SimpleNamespace(device=torch.device("cpu"))

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass


def test_lower_decile() -> None:
    values = list(range(101))
    random.shuffle(values)
    assert lower_decile(values) == 10
    assert lower_decile([3.0]) == 3.0
    assert lower_decile([9.0, 1.0]) == 1.0


def taken(*samples: list[float]) -> Case:
    """A case that took so long, by rank."""
    return Case(lambda: None, samples=samples)


def test_slowest_rank_counts() -> None:
    assert taken([1.0] * 9, [2.0] * 8 + [50.0]).seconds == 2.0
    assert taken([9.0], [3.0]).seconds == 9.0


def test_disturbed_small_sizes_are_corrected_by_larger_ones() -> None:
    assert rising([taken([seconds]) for seconds in (5.0, 1.0, 4.0, 2.0)]) == (1.0, 1.0, 2.0, 2.0)


def test_straggle() -> None:
    """Ranks that are disturbed in turn are all late together; ranks that are always equal never."""
    assert taken([1.0, 2.0, 1.0, 2.0, 1.0], [2.0, 1.0, 2.0, 1.0, 1.0]).straggle == 1.0
    assert taken([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).straggle == 0.0


def test_jitter_is_how_late_the_last_of_several_ranks_is() -> None:
    """In the mean of all times but the longest tenth; a rank that is alone is waited for by nobody."""
    assert taken([1.0, 2.0, 1.0, 1.0], [1.0, 1.0, 2.0, 1.0]).jitter == pytest.approx(0.5)
    assert taken([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]).jitter == 0
    assert taken([1.0, 2.0, 4.0]).jitter == 0


def test_what_a_pass_does_often_counts_by_its_mean() -> None:
    """One repeat in three takes four times as long; but the longest tenth does not count."""
    seconds = [1.0, 1.0, 4.0] * 10
    random.shuffle(seconds)
    idle = [0.5] * len(seconds)
    two = taken(seconds, idle).together
    kept = sorted(seconds)[: 30 - 29 // 10]
    assert two == pytest.approx(sum(kept) / len(kept)) and 1.7 < two < 2
    assert taken([3.0], [7.0]).together == 7.0


def test_heavier_cells_get_more_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a millisecond with each call."""
    cases, calls = Cases(Alone()), {"light": 0, "heavy": 0}  # type: ignore[arg-type]

    def count(name: str) -> None:
        calls[name] += 1

    clock = SimpleNamespace(perf_counter=lambda: 1e-3 * sum(calls.values()))
    monkeypatch.setattr("megakv.costmodel.stopwatch.time", clock)

    for name, weight in (("light", 1.0), ("heavy", 3.0)):
        cases.add(lambda name=name: count(name), weight=weight)  # type: ignore[misc]
    cases.run(0.2)
    assert calls["heavy"] > 2 * calls["light"] > 0


def test_rounds_take_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still, where time is never up before the last round."""
    cases, calls = Cases(Alone()), {"a": 0, "b": 0}  # type: ignore[arg-type]

    def count(name: str) -> None:
        calls[name] += 1

    added = [cases.add(lambda name=name: count(name)) for name in calls]  # type: ignore[misc]
    reports: list[int] = []
    cases.run(0.0, lambda: reports.append(0))
    # Time is up at once: the least number of rounds, a call each, after two to warm up and to learn how long it takes.
    assert calls == {"a": 2 + LEAST_ROUNDS, "b": 2 + LEAST_ROUNDS}
    assert len(reports) == 2 * LEAST_ROUNDS
    assert all(case.seconds >= 0 for case in added)
    reports.clear()
    monkeypatch.setattr("megakv.costmodel.stopwatch.time", SimpleNamespace(perf_counter=lambda: 0.0))
    cases.run(5.0, lambda: reports.append(0))
    assert len(reports) == 2 * ROUNDS


def test_pool_hands_out_other_numbers_until_it_is_round() -> None:
    pool = Pool(torch.float32, torch.device("cpu"), 400)
    first, second = pool.take(5, 8), pool.take(40)
    assert first.shape == (5, 8) and first.is_contiguous()
    assert second.data_ptr() == first.data_ptr() + 160
    assert pool.take(30).data_ptr() == first.data_ptr()
    large = pool.take(1000)
    assert large.shape == (1000,) and large.isfinite().all()
    assert Pool(torch.bfloat16, torch.device("cpu"), 64).take(3).dtype == torch.bfloat16
