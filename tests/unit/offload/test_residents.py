"""Rows that stay on the accelerator, of prompts in pieces and of later turns; and reports of what steps did."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megakv.offload.host_rank import HostRows
from megakv.offload.store import TieredStore
from tests.unit.offload.test_exactness import NEW, generate, plain_model, ragged

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def tokens_gb(model: Any, tokens: int) -> float:
    """A budget for so many tokens of a sequence of two in every layer."""
    return model.config.num_hidden_layers * 2 * tokens * 2 * model.config.hidden_size * 4 / (1 << 30)


def decoding(engine: Any) -> list[Any]:
    """The reports of the last generation's steps of decoding."""
    return engine.report().ranks[0].offload[-(NEW - 1) :]


def works(method: str, recomputed: int, on_host: int) -> bool:
    """Whether a step did what its method is for; `auto` may do either, or both."""
    if method == "auto":
        return recomputed > 0 or on_host > 0
    return (recomputed > 0, on_host > 0) == (method == "kvpr", method == "cpu_rank")


def check_last(cache: Any, prompt: int, tokens: int) -> None:
    """Whether the last rows of each sequence are resident, but for a few that were generated since."""
    for layer in range(len(cache)):
        store = cache.store(layer)
        for sequence in range(cache.table.batch):
            rows, length = store.residents.rows[sequence], store.rows(sequence)
            assert rows is not None and len(rows.rows) == tokens
            assert prompt <= rows.end <= length <= rows.end + tokens
            whole = torch.cat([run for _, run in store.rows_in_memory(sequence, length)])
            torch.testing.assert_close(rows.rows, whole[rows.first : rows.end], rtol=1e-4, atol=1e-5)


@pytest.mark.drawn(2)
@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("method", ["kvpr", "cpu_rank", "auto"])
def test_prompts_in_pieces_and_later_turns(method: str, offloaded: Callable[..., Any]) -> None:
    model = plain_model("opt")
    ids, mask = torch.randint(3, 190, (2, 41), generator=torch.Generator().manual_seed(4)), torch.ones(2, 41).long()
    ids[1, :3] = mask[1, :3] = 0
    engine = offloaded(copy.deepcopy(model), method=method, device_gb=tokens_gb(model, 7))
    expected = generate(model, ids, mask)
    whole = []
    for chunk in (None, 16, 5, 1):
        # Some rows of the first chunks would take the whole budget, and are the first of the prompt.
        assert torch.equal(generate(engine, ids, mask, prefill_chunk_size=chunk), expected)
        whole.append([(step.resident, step.recomputed, step.on_host) for step in decoding(engine)])
    # Tokens that come one by one move them now and then.
    assert all(step[0] == 14 for steps in whole for step in steps)
    assert all(works(method, *step[1:]) for steps in whole for step in steps)
    assert method == "auto" or whole[0] == whole[1]
    session, history = engine.session(), torch.empty(2, 0, dtype=torch.int64)
    for number, chunk in enumerate((None, 9, None)):
        turn = torch.randint(3, 190, (2, 23), generator=torch.Generator().manual_seed(number))
        history = torch.cat([history, turn], dim=1)
        prompt = history.shape[1]
        expected = generate(model, history, torch.ones_like(history))
        history = session.generate(turn, max_new_tokens=NEW, prefill_chunk_size=chunk, **GREEDY)
        assert torch.equal(history, expected)
        for step in decoding(engine):
            assert step.resident == 14 and works(method, step.recomputed, step.on_host)
        check_last(session._cache, prompt, 7)
    # A copy shares what is resident; it goes on with its own where there is memory, and without loss where not.
    twin = session.fork()
    turn = torch.randint(3, 190, (2, 11), generator=torch.Generator().manual_seed(9))
    longer = torch.cat([history, turn], dim=1)
    expected = generate(model, longer, torch.ones_like(longer))
    for each in (twin, session):
        assert torch.equal(each.generate(turn, max_new_tokens=NEW, **GREEDY), expected)
        assert 0 < sum(engine._offloader.residents.used) <= tokens_gb(model, 7) * (1 << 30)
        assert all(step.resident for step in decoding(engine))


@pytest.mark.usefixtures("fixed_costs")
def test_the_report_says_what_was_done(offloaded: Callable[..., Any], tmp_path: Any) -> None:
    """The first layer has a page in memory that the others lack: its plan cannot be followed there."""
    model = plain_model("opt")
    layers, pages = model.config.num_hidden_layers, 3
    row = 2 * model.config.hidden_size * 4
    engine = offloaded(
        copy.deepcopy(model),
        method="cpu_rank",
        host_gb=(pages * layers + 1) * 8192 / (1 << 30),
        disk_gb=0.01,
        disk_path=str(tmp_path),
    )
    ids = torch.randint(3, 190, (1, 8 * 8192 // row), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    session = engine.session()
    asked: list[int] = []
    start = engine._offloader._host_rank.start

    def spy(call: Any, q: Any, tokens: Any, store: TieredStore, rows: HostRows, *parts: Any) -> Any:
        asked.append(sum(len(run) for each in rows.runs for _, run in each))
        return start(call, q, tokens, store, rows, *parts)

    engine._offloader._host_rank.start = spy
    found = session.generate(ids, mask, max_new_tokens=NEW, min_new_tokens=NEW, **GREEDY)
    assert torch.equal(found, generate(model, ids, mask, min_new_tokens=NEW))
    steps = engine._offloader.steps
    assert len(asked) == len(steps) * layers
    for number, step in enumerate(steps):
        own = asked[number * layers : (number + 1) * layers]
        planned = sum(split.on_host for split in step.plan.splits)
        assert step.report().on_host == round(sum(own) / layers) != planned
    # What is restored has no activations, and what begins with it reports none that were recomputed.
    session.save(tmp_path / "saved")
    recomputing = offloaded(copy.deepcopy(model), method="kvpr")
    again = recomputing.restore_session(tmp_path / "saved")
    again.generate(ids[:, :3], max_new_tokens=NEW, **GREEDY)
    assert all(step.recomputed == 0 and step.streamed == step.cached for step in decoding(recomputing))


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("method", ["kvpr", "cpu_rank", "auto"])
def test_some_tokens_stay_on_the_accelerator(method: str, offloaded: Any) -> None:
    model = plain_model("opt")
    ids, mask = ragged()
    budget = model.config.num_hidden_layers * 42 * 2 * model.config.hidden_size * 4
    engine = offloaded(copy.deepcopy(model), method=method, device_gb=budget / (1 << 30))
    for beams in (1, 2):
        expected = generate(model, ids, mask, num_beams=beams)
        assert torch.equal(generate(engine, ids, mask, num_beams=beams), expected)
        steps = engine._offloader.steps
        kept = [step.split.resident for step in steps]
        # The short prompt's share is not used up: generated tokens come to it.
        assert 0 < kept[0] and kept == sorted(kept)
        assert 0 < sum(engine._offloader.residents.used) <= budget
    session = engine.session()
    turn = torch.randint(3, 190, (2, 15), generator=torch.Generator().manual_seed(3))
    first = session.generate(turn, max_new_tokens=4, do_sample=False, pad_token_id=0)
    session.cut_back(11)
    longer = torch.cat([first[:, :11], turn], dim=1)
    expected = generate(model, longer, torch.ones_like(longer), max_new_tokens=4)
    assert torch.equal(session.generate(turn, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)


def test_resident_tokens_are_not_sent(offloaded: Any) -> None:
    model = plain_model("gpt_neox")
    ids, mask = ragged()
    sent = []
    for device_gb in (0.0, 0.05):
        engine = offloaded(copy.deepcopy(model), method="stream", device_gb=device_gb)
        generate(engine, ids, mask)
        sent.append(sum(step.bytes_in for step in engine._offloader.steps[3:]))
    assert sent[1] < sent[0] / 3
