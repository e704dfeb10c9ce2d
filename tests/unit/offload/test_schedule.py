"""What is left to the objective: the plain model's tokens whatever it chooses, and the reasons that it gives."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig

from megakv.costmodel.hardware import Fingerprint
from megakv.costmodel.memory import rank_memory
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.shape import ModelShape
from megakv.offload import schedule
from megakv.offload.config import OffloadConfig
from megakv.offload.schedule import GroupSchedule, weights_by_objective
from tests.unit.offload.test_columns import SLOW_GB_S, deep_model
from tests.unit.offload.test_exactness import generate, ragged

PROFILE = PRESETS["a100-pcie4"].profile(cp_size=1)


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


def test_weights_lie_where_most_tokens_are_predicted(tmp_path: Path) -> None:
    width = 1024
    sizes = {"hidden_size": width, "ffn_dim": 4 * width, "word_embed_proj_dim": width, "num_attention_heads": 16}
    model = ModelShape.from_config(OPTConfig(num_hidden_layers=24, **sizes), dtype=torch.float16)
    whole = rank_memory(model, context=1000, offloaded=True).total
    path = tmp_path / "profile.json"
    given: dict[str, Any] = {"longest": 1000, "cp_size": 1, "tp_size": 1}

    def why(room: int = whole, profile: Path | None = None, **changed: Any) -> tuple[bool, str]:
        named = None if profile is None else str(profile)
        config = OffloadConfig(enabled=True, objective="throughput", host_gb=64, profile=named)
        return weights_by_objective(config, changed.pop("model", model), room=room, **{**given, **changed})

    assert why(room=0) == (
        False,
        "weights stay on the accelerator: its memory is the host's, so they would make no room",
    )
    assert "nothing is predicted without megakv.offload.profile" in why()[1] and not why()[0]
    assert "nothing is predicted without max_out_tokens" in why(longest=None)[1]
    assert "the model's config does not tell its sizes" in why(model=None)[1]
    # Of this machine, as a profile of another one is refused.
    own = Fingerprint.of_this_process(hosts=1, ranks=1, dtype=model.dtype)
    link = PRESETS["a100-pcie4"].host.curve()
    profile = PROFILE.model_copy(update={"fingerprint": own, "host_link": link})
    path.write_text(profile.model_dump_json())
    assert not why(room=100 * whole, profile=path)[0]
    tight, words = why(room=int(0.5 * whole), profile=path)
    assert tight and "no room for one sequence with weights on the accelerator" in words
