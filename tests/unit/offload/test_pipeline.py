"""Steps of offloaded layers: the closed form takes as long as a program that goes from layer to layer."""

import random
from collections.abc import Sequence

import pytest

from megakv.offload.pipeline import BUFFERS, StepTimes, step_seconds
from megakv.offload.prices import RESIDENT, WeightTimes

STEPS = 12


def played_seconds(groups: Sequence[StepTimes], layers: int, weights: WeightTimes, *, ahead: bool) -> float:
    """Seconds of a late one of many steps, by when the link and the accelerator are free, group by group.

    A group's transfers begin when one of two buffers is free. Its recomputation begins with its transfers and ends with
    the last activations, its attention ends when everything is there. Weights, but for W_K and W_V, come into the place
    of those of the layer before the last, in as many pieces as there are groups, and as many groups early as are in the
    buffers' way.
    """
    device = link = begun = 0.0
    released, ended, pieces, count = [0.0, 0.0], [0.0, 0.0], list[float](), len(groups)
    for _ in range(STEPS):
        begun, link = device, link if ahead else max(link, device)
        for _ in range(layers):
            for index, times in enumerate(groups):
                start = max(link, released.pop(0)) + (0.0 if index else weights.keys_s)
                landed, link = start + times.landed_s, start + times.sent_s
                while weights.others_s and len(pieces) <= index + max(0, count - BUFFERS):
                    link = max(link, ended[len(pieces) // count]) + weights.others_s / count
                    pieces.append(link)
                if index == 0 and pieces:
                    # Queries' weights come in the first piece.
                    device = max(device, pieces[0])
                queries = max(device + times.recompute_s, landed + times.last_s)
                if times.recompute_s:
                    queries = max(queries, start + times.recompute_s)
                device = max(queries + times.host_s, max(queries, start + times.sent_s) + times.attend_s)
                released.append(device)
            # Projections and feed-forward are computed for all sequences at once.
            device = max(device + sum(times.layer_s for times in groups), *pieces[count - 1 : count], 0.0)
            ended = [ended[1], device]
            del pieces[:count]
        device += groups[0].outside_s
    return device - begun


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("ahead", [True, False])
def test_the_closed_form_takes_as_long_as_a_program(ahead: bool, seed: int) -> None:
    """Exactly, of equal groups whose first transfers come ahead and whose weights stay; about so, of others."""
    generator = random.Random(seed)
    recompute = generator.choice((0.0, generator.uniform(0, 3)))
    landed = generator.uniform(0, 2) if recompute else 0.0
    times = StepTimes(
        sent_s=landed + generator.uniform(0, 4),
        landed_s=landed,
        recompute_s=recompute,
        last_s=recompute * generator.random(),
        layer_s=generator.uniform(0.1, 3),
        host_s=generator.choice((0.0, 1.5)),
        outside_s=generator.uniform(0, 2),
        attend_s=generator.uniform(0, 1),
    )
    groups = [times] * generator.choice((1, 1, 2, 5))
    weights = generator.choice((RESIDENT, WeightTimes(generator.uniform(0, 1), generator.uniform(0, 5))))
    layers = generator.choice((2, 3, 30, 31))
    found, expected = (
        step_seconds(groups, layers, weights, ahead=ahead),
        played_seconds(groups, layers, weights, ahead=ahead),
    )
    exact = ahead and weights == RESIDENT
    # Where a step begins cold, and weights come in pieces, there are more ways in which one waits for the other.
    assert found == pytest.approx(expected, rel=0.03 if exact else 0.2)


def test_a_pipeline_runs_at_the_pace_of_its_slower_side() -> None:
    slow_link = StepTimes(sent_s=10.0, landed_s=4.0, recompute_s=3.0, last_s=1.0, layer_s=2.0, outside_s=1.0)
    assert step_seconds([slow_link], 8) == pytest.approx(80.0)
    slow_device = StepTimes(sent_s=4.0, landed_s=2.0, recompute_s=3.0, last_s=3.0, layer_s=6.0, outside_s=5.0)
    assert step_seconds([slow_device], 8) == pytest.approx(8 * 9.0 + 5.0)


def test_what_cannot_come_ahead_is_waited_for() -> None:
    times = StepTimes(sent_s=3.0, layer_s=4.0, outside_s=5.0)
    assert step_seconds([times], 6) == pytest.approx(6 * 4.0 + 5.0)
    assert step_seconds([times], 6, ahead=False) == pytest.approx(3.0 + 6 * 4.0 + 5.0)
