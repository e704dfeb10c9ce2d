"""Families that bypass the attention interface: with MegaKV's forward they give what the plain model gives."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megakv.base.errors import MegaKVError
from megakv.distributed.sharding import new_tokens
from megakv.injection.families import SubstitutedForward
from megakv.injection.interface import ATTEND_ATTRIBUTE, CausalMask
from megakv.injection.ownership import attach, detach
from tests.unit.injection.substituted import (
    ALIBI,
    CONFIGS,
    DenseRuntime,
    Substituted,
    plain_model,
    random_ids,
    relative_error,
)


@pytest.mark.parametrize("length", [1, 2, 63, 700])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_plain_models(name: str, length: int) -> None:
    model = plain_model(name)
    ids = random_ids(1, length)
    with torch.no_grad():
        wanted = model(ids).logits
    assert relative_error(Substituted(model)(ids), wanted) < 2e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_left_padding_and_further_turns(name: str) -> None:
    model = plain_model(name)
    mask = torch.ones(3, 41, dtype=torch.long)
    mask[0, :13] = 0
    mask[2, :35] = 0
    ids = random_ids(3, 41)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
    substituted = Substituted(model)
    for start, stop in ((0, 37), (37, 38), (38, 41)):
        got = substituted(ids[:, start:stop], mask[:, start:stop])
        real = mask[:, start:stop].bool()
        assert relative_error(got[real], wanted[:, start:stop][real]) < 2e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_as_near_to_float64_as_the_plain_model(name: str) -> None:
    ours, plain = 0.0, 0.0
    for seed in range(3):
        model = plain_model(name, torch.bfloat16, seed)
        ids = random_ids(1, 400)
        with torch.no_grad():
            exact = copy.deepcopy(model).double()(ids).logits
            plain += float((model(ids).logits.double() - exact).square().mean())
        ours += float((Substituted(model)(ids).double() - exact).square().mean())
    assert ours**0.5 <= 1.1 * plain**0.5


@pytest.mark.parametrize("name", ALIBI)
def test_biases_matter_in_these_tests(name: str) -> None:
    model = plain_model(name)
    ids = random_ids(1, 63)
    substituted = Substituted(model)
    for module in substituted.model.modules():
        if isinstance(module.forward, SubstitutedForward) and module.forward.slopes is not None:
            module.forward.slopes = 0.9 * module.forward.slopes
    with torch.no_grad():
        assert relative_error(substituted(ids), model(ids).logits) > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_only_this_instance_changes_and_weights_keep_their_names(name: str) -> None:
    model, untouched = plain_model(name), plain_model(name)
    before = model.state_dict(keep_vars=True)
    for _ in range(2):
        attach(model, DenseRuntime().attend)
        after = model.state_dict(keep_vars=True)
        assert list(after) == list(before)
        assert all(after[key] is before[key] for key in before)
    ids = random_ids(1, 9)
    with torch.no_grad():
        assert torch.isfinite(untouched(ids).logits).all()
    assert any(isinstance(module.forward, SubstitutedForward) for module in model.modules())
    assert not any(isinstance(module.forward, SubstitutedForward) for module in untouched.modules())
    detach(model)
    assert not any("forward" in vars(module) for module in model.modules())


def cut(linear: nn.Linear, rows: list[int] | None, columns: list[int] | None) -> nn.Linear:
    weight = linear.weight if rows is None else linear.weight[rows]
    weight = weight if columns is None else weight[:, columns]
    bias = linear.bias
    if bias is not None and rows is not None:
        bias = bias[rows]
    part = type(linear)(weight.shape[1], weight.shape[0], bias=bias is not None and columns is None)
    part.weight = nn.Parameter(weight)
    if part.bias is not None:
        part.bias = nn.Parameter(bias)
    return part


@pytest.mark.parametrize(
    "name", ["falcon_alibi", "falcon_alibi_12_heads", "bloom", "bloom_12_heads", "mpt", "mpt_12_heads_clipped"]
)
def test_heads_of_a_shard_take_their_own_slopes(name: str) -> None:
    """Parts of an attention module with some of the heads, any of them, add up to the whole module."""
    torch.manual_seed(1)
    model = plain_model(name)
    heads: int = model.config.num_attention_heads
    dim = model.config.hidden_size // heads
    hidden = torch.randn(1, 50, heads * dim)
    order = torch.randperm(heads).tolist()
    outputs = []
    for kept in (list(range(heads)), order[: heads // 3], order[heads // 3 :]):
        part = copy.deepcopy(model)
        fused, out = ("Wqkv", "out_proj") if "mpt" in name else ("query_key_value", "dense")
        for module in part.modules():
            if hasattr(module, fused):
                per_head = np.arange(3 * heads * dim).reshape((3, heads, dim) if "mpt" in name else (heads, 3, dim))
                rows = per_head[:, kept] if "mpt" in name else per_head[kept]
                columns = np.arange(heads * dim).reshape(heads, dim)[kept]
                setattr(module, fused, cut(getattr(module, fused), rows.reshape(-1).tolist(), None))
                setattr(module, out, cut(getattr(module, out), None, columns.reshape(-1).tolist()))
                module.head_shard = SimpleNamespace(query_heads=tuple(kept))
        runtime = DenseRuntime()
        attach(part, runtime.attend)
        runtime.tokens.append(new_tokens(np.ones((1, 50), dtype=bool), np.arange(50)[None], 0))
        attention: Any = next(module for module in part.modules() if hasattr(module, ATTEND_ATTRIBUTE))
        with torch.no_grad():
            outputs.append(
                attention(
                    hidden_states=hidden,
                    residual=torch.zeros(()),
                    alibi=None,
                    position_bias=None,
                    position_ids=torch.arange(50)[None],
                    position_embeddings=None,
                    attention_mask=CausalMask(),
                )[0]
            )
    whole, first, second = outputs
    assert relative_error(first + second, whole) < 1e-5


@pytest.mark.parametrize("name", ["falcon", "bloom", "gpt_j", "mpt"])
def test_masks_that_are_not_causal_are_refused(name: str) -> None:
    substituted = Substituted(plain_model(name))
    if name != "bloom":  # which refuses such a mask itself
        mask = torch.ones(1, 1, 5, 5)
        with pytest.raises(MegaKVError, match="did not come from transformers' mask interface"):
            substituted.model(random_ids(1, 5), attention_mask=mask, past_key_values=substituted.cache)
    substituted.model.config.is_causal = False
    with pytest.raises(MegaKVError, match="neither causal nor"):
        substituted(random_ids(1, 5))


def test_a_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CausalMask, "to", lambda mask, *_: CausalMask(window=7))
    with pytest.raises(MegaKVError, match="sliding window"):
        Substituted(plain_model("mpt"))(random_ids(1, 5))


def test_bloom_with_sliced_products_is_refused() -> None:
    model = plain_model("bloom")
    model.config.slow_but_exact, model.config.pretraining_tp = True, 2
    with pytest.raises(ValueError, match="slow_but_exact"):
        attach(model, DenseRuntime().attend)
