"""Budgets that a generation would outgrow: refused with numbers, and nothing that was there is lost."""

import copy
from typing import Any

import pytest
import torch

from tests.unit.offload.test_exactness import generate, plain_model


def test_outgrown_budgets_are_named_and_sessions_survive(offloaded: Any) -> None:
    model = plain_model("opt")
    engine = offloaded(copy.deepcopy(model), host_gb=24 * 8 / (1 << 20))
    session = engine.session()
    turn = torch.randint(3, 190, (1, 20), generator=torch.Generator().manual_seed(3))
    first = session.generate(turn, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with pytest.raises(RuntimeError, match=r"outgrow their budgets: megakv.offload.host_gb holds 192.00 KiB"):
        session.generate(turn.repeat(1, 30), max_new_tokens=4, do_sample=False, pad_token_id=0)
    # Layer 0 has room for this one, the others have not: that is seen before they are computed.
    with pytest.raises(RuntimeError, match="this generation needs 240.00 KiB"):
        session.generate(turn.repeat(1, 6), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert session.length == first.shape[1] - 1
    longer = torch.cat([first, turn], dim=1)
    expected = generate(model, longer, torch.ones_like(longer), max_new_tokens=4)
    assert torch.equal(session.generate(turn, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)


def test_what_cannot_fit_is_refused_before_it_is_computed(offloaded: Any) -> None:
    model = plain_model("opt")
    layers = model.config.num_hidden_layers
    engine = offloaded(copy.deepcopy(model), method="stream", host_gb=layers * 4 * 8 / (1 << 20))
    ids = torch.randint(3, 190, (2, 20), generator=torch.Generator().manual_seed(3))
    # A page holds 16 tokens of a layer: 64 KiB are two pages per layer and sequence.
    with pytest.raises(
        RuntimeError,
        match=r"needs 96.00 KiB.*40 tokens so far, up to 20 more for each of 2 sequences.*host_gb holds 64.00 KiB",
    ):
        engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20)
    expected = generate(model, ids, torch.ones_like(ids), max_new_tokens=12)
    assert torch.equal(generate(engine, ids, torch.ones_like(ids), max_new_tokens=12), expected)
