"""Simulated decoding with keys and values off the accelerator, against a clock that a person could keep."""

import random

import pytest

from megakv.costmodel.simulation import Simulation
from megakv.offload.method import Split
from megakv.offload.pipeline import StepTimes, step_seconds
from megakv.offload.prices import RESIDENT, WeightTimes
from megakv.offload.times import OffloadedStep
from megakv.planner.virtual_runs import play_offload
from tests.unit.costmodel.test_simulation import Tasks


def offload_tasks(times: StepTimes, layers: int, steps: int) -> list[float]:
    """When each step of decoding ends: two buffers, and recomputation that begins with the first activations."""
    tasks = Tasks()
    attended: list[int] = []
    busy: list[int] = []
    carried: list[int] = []
    ends = []
    for _ in range(steps):
        for _ in range(layers):
            first = tasks.add("link", 0.0, [*carried, *attended[-2:][: len(attended) >= 2]])
            landed = tasks.add("link", times.landed_s, [first])
            carried = [tasks.add("link", times.sent_s - times.landed_s, [landed])]
            early = tasks.add("processor", times.recompute_s - times.last_s, [*busy, first])
            queries = tasks.add("processor", times.last_s, [early, landed])
            parts = [
                tasks.add("processor", times.attend_s, [queries, *carried]),
                tasks.add("host", times.host_s, [queries]),
            ]
            attended.append(tasks.add("processor", 0.0, parts))
            busy = [tasks.add("processor", times.layer_s, [attended[-1]])]
        busy = [tasks.add("processor", times.outside_s, busy)]
        ends.append(busy[0])
    found = tasks.ends()
    return [found[end] for end in ends]


def offloaded(times: StepTimes, weights: WeightTimes = RESIDENT) -> OffloadedStep:
    return OffloadedStep(0.0, times, Split(1), weights)


def test_offloaded_decoding_against_a_clock_that_looks_at_all() -> None:
    """Exactly, where the accelerator sets a layer's pace. Where the link does, in one of a hundred such machines the
    closed form lets it wait longer at the end of a step than the clock; never shorter.
    """
    equal = 0
    for _ in range(10):
        landed, recompute = random.uniform(0, 2), random.uniform(0, 3)
        times = StepTimes(
            sent_s=landed + random.uniform(0, 4),
            landed_s=landed,
            recompute_s=recompute,
            last_s=recompute * random.random(),
            layer_s=random.uniform(0.1, 3),
            host_s=random.choice((0.0, 1.5)),
            outside_s=random.uniform(0, 2),
            attend_s=random.choice((0.0, random.uniform(0, 2))),
        )
        layers = random.choice((2, 5, 9))
        ends = offload_tasks(times, layers, 4)
        found, expected = ends[-1] - ends[-2], step_seconds([times], layers)
        if times.sent_s <= times.recompute_s + times.host_s + times.layer_s:
            assert found == pytest.approx(expected)
        assert found <= expected * (1 + 1e-6) and expected <= 1.1 * found
        equal += found == pytest.approx(expected)
        played = [Simulation(2), Simulation(2)]
        for steps, one in zip((5, 4), played, strict=True):
            play_offload(one, offloaded(times), layers, steps=steps)
        assert played[0].seconds - played[1].seconds == pytest.approx(expected)
    # Four of ten such machines are met in one of a million runs.
    assert equal >= 7


def test_weights_and_cache_share_one_link() -> None:
    """Neither alone fills the link; together they do, and bytes are all there."""
    times = StepTimes(sent_s=0.6, landed_s=0.0, recompute_s=0.0, last_s=0.0, layer_s=1.0)
    alone, both = Simulation(1), Simulation(1)
    play_offload(alone, offloaded(times), 10, steps=5, sent=(0, 600, 0))
    play_offload(both, offloaded(times, WeightTimes(0.3, 0.4)), 10, steps=5, sent=(0, 600, 700))
    assert alone.seconds == pytest.approx(50, rel=0.02)
    assert both.seconds == pytest.approx(1.3 * 50, rel=0.05)
    assert sum(each.bytes_sent for each in both.traffic(0)) == 50 * 1300
    assert sum(each.bytes_sent for each in both.traffic(0) if each.operation == "weights") == 50 * 700
