"""What is left to the objective: the plain model's tokens whatever it chooses, and the reasons that it gives."""

import copy
import itertools
from typing import Any

import pytest
import torch

from megakv.offload import schedule
from megakv.offload.schedule import GroupSchedule
from megakv.offload.times import group_counts
from tests.unit.offload.test_columns import SLOW_GB_S, deep_model
from tests.unit.offload.test_exactness import generate, ragged


def steps_of(engine: Any) -> list[int]:
    return [step.groups for step in engine.report().ranks[0].offload]


def test_default_engines_go_row_by_row(offloaded: Any) -> None:
    ids, mask = ragged(4)
    engine = offloaded(deep_model("llama"), method="stream")
    generate(engine, ids, mask)
    report = engine.report()
    assert report.ranks[0].schedule == "row by row: megakv.offload.objective = 'latency'"
    assert set(steps_of(engine)) == {1} and "offload/groups" not in report.scalars()
    named = offloaded(deep_model("llama"), method="stream", objective="throughput", num_gpu_batches=3)
    generate(named, ids, mask)
    assert "3 groups: megakv.offload.num_gpu_batches = 3" in named.report().ranks[0].schedule
    assert set(steps_of(named)) == {3} and named.report().scalars()["offload/groups"] == 3


@pytest.mark.parametrize(("weights", "beams"), [(True, 1), (False, 2)])
def test_groups_change_between_steps(
    weights: bool, beams: int, offloaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is chosen, and however often: tokens stay the plain model's."""
    model, (ids, mask) = deep_model("opt"), ragged(4)
    asked = {"max_new_tokens": 12, "num_beams": beams}
    expected = generate(model, ids, mask, **asked)
    given = {"method": "stream", "weights": weights, "objective": "throughput", "emulated_link_gb_s": SLOW_GB_S}
    engine = offloaded(copy.deepcopy(model), **given)
    turns = itertools.cycle((4, 1, 2))
    monkeypatch.setattr(GroupSchedule, "_fitting", lambda *_, **__: next(turns))
    for _ in range(2):
        assert torch.equal(generate(engine, ids, mask, **asked), expected)
    found = steps_of(engine)
    assert set(found) == {1, 2, 4} and engine.report().ranks[0].schedule.endswith(": has room")
    assert {step.weight_bytes > 0 for step in engine.report().ranks[0].offload} == {weights}


def test_prompts_go_in_the_fewest_groups_that_have_room(offloaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask) = deep_model("llama"), ragged(4)
    expected = generate(model, ids, mask, max_new_tokens=2)
    engine = offloaded(copy.deepcopy(model), method="stream", objective="throughput")
    seen: list[int] = []
    layer = engine.module.model.layers[2]
    layer.mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    for room, passes in ((1 << 40, 1), (0, 4)):
        monkeypatch.setattr(schedule, "accelerator_room", lambda room=room: room)
        seen.clear()
        assert torch.equal(generate(engine, ids, mask, max_new_tokens=2), expected)
        assert len(seen) == passes + 1 and sum(seen[:-1]) == int(mask.sum())


@pytest.mark.parametrize(("batch", "counts"), [(1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_numbers_of_groups(batch: int, counts: list[int]) -> None:
    assert group_counts(batch) == counts
