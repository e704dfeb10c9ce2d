"""Sessions whose keys and values lie off the accelerator go on, are forked, cut, saved and restored."""

import copy
from typing import Any

import pytest
import torch

from tests.unit.offload.test_exactness import generate, plain_model


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("method", ["stream", "chunked", "auto"])
def test_sessions_go_on_fork_and_are_cut(method: str, offloaded: Any) -> None:
    model = plain_model("qwen3")
    generator = torch.Generator().manual_seed(11)
    turns = [torch.randint(3, 190, (2, length), generator=generator) for length in (17, 1, 9)]
    engine = offloaded(copy.deepcopy(model), method=method)
    session = engine.session()
    history = torch.empty(2, 0, dtype=torch.int64)
    for turn in turns:
        history = torch.cat([history, turn], dim=1)
        expected = generate(model, history, torch.ones_like(history), max_new_tokens=5)
        assert torch.equal(session.generate(turn, max_new_tokens=5, do_sample=False, pad_token_id=0), expected)
        history = expected
    twin = session.fork()
    for other, seed in ((twin, 1), (session, 2)):
        turn = torch.randint(3, 190, (2, 6), generator=torch.Generator().manual_seed(seed))
        longer = torch.cat([history, turn], dim=1)
        expected = generate(model, longer, torch.ones_like(longer), max_new_tokens=4)
        assert torch.equal(other.generate(turn, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)
    session.cut_back(20)
    longer = torch.cat([session.input_ids, turns[2]], dim=1)
    expected = generate(model, longer, torch.ones_like(longer), max_new_tokens=4)
    assert torch.equal(session.generate(turns[2], max_new_tokens=4, do_sample=False, pad_token_id=0), expected)


@pytest.mark.usefixtures("fixed_costs")
def test_a_saved_session_streams_what_has_no_activations(offloaded: Any, tmp_path: Any) -> None:
    model = plain_model("opt")
    engine = offloaded(copy.deepcopy(model), method="chunked")
    turn = torch.randint(3, 190, (2, 15), generator=torch.Generator().manual_seed(3))
    session = engine.session()
    first = session.generate(turn, max_new_tokens=4, do_sample=False, pad_token_id=0)
    session.save(tmp_path / "saved")
    restored = engine.restore_session(tmp_path / "saved")
    longer = torch.cat([first, turn], dim=1)
    expected = generate(model, longer, torch.ones_like(longer), max_new_tokens=6)
    for each in (session, restored):
        assert torch.equal(each.generate(turn, max_new_tokens=6, do_sample=False, pad_token_id=0), expected)
        recomputed = [step.split.recomputed for step in engine._offloader.steps]
        assert any(recomputed) == (each is session)
