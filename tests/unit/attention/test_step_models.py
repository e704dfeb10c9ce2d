"""Whole models decode by steps of one call, against transformers: families, batches, sessions, failed passes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import megakv
from megakv.attention.step import load_step
from megakv.forward.runtime import Runtime
from megakv.weights.products import Products
from tests import families

NEW = 20
PLAIN = {"llama", "mistral", "gpt_oss", "qwen3", "gemma3"}
"""Of the families, some all of whose layers go that way: grouped heads, windows, sinks, norms of heads."""


@pytest.fixture
def steps(alone: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers of all steps that were taken so."""
    if load_step()[0] is None:
        pytest.skip(f"no compiled kernel: {load_step()[1]}")
    taken: list[int] = []
    stepped = Runtime.stepped

    def noted(self: Runtime, step: Any, layer: int, window: int | None) -> None:
        stepped(self, step, layer, window)
        taken.append(layer)

    monkeypatch.setattr(Runtime, "stepped", noted)
    # Prompts are not steps, however fast this machine would compute them so.
    monkeypatch.setattr(Products, "measured", classmethod(lambda cls, dtype: cls()))
    return taken


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(families.FAMILIES[name](), dtype=dtype).eval()


def prompts(batch: int) -> tuple[Tensor, Tensor]:
    """Of several lengths, padded on the left."""
    ids, mask = torch.randint(3, families.VOCAB, (batch, 40)), torch.ones(batch, 40, dtype=torch.long)
    for row in range(1, batch):
        mask[row, : int(torch.randint(0, 30, ()))] = 0
    return ids, mask


def generated(model: Any, ids: Tensor, mask: Tensor) -> Any:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True
    )


@pytest.mark.drawn(6)
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_families_generate_what_transformers_does(steps: list[int], name: str, batch: int) -> None:
    ids, mask = prompts(batch)
    expected = generated(model_of(name), ids, mask)
    with megakv.init_inference(model_of(name), {"dtype": "fp32"}) as engine:
        found = generated(engine, ids, mask)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)
    if name in PLAIN:
        assert len(steps) == len(set(steps)) * (NEW - 1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_in_bf16_it_is_as_exact_as_transformers(steps: list[int], name: str) -> None:
    ids, mask = prompts(3)
    wide = model_of(name)
    narrow = model_of(name, torch.bfloat16)
    wide.load_state_dict(narrow.state_dict())
    whole = generated(wide, ids, mask)
    tokens = whole.sequences

    def errors(step: Any) -> Tensor:
        """Of the logits of tokens that are given one by one."""
        found = []
        for column in range(ids.shape[1], tokens.shape[1]):
            found.append(step(tokens[:, :column], torch.cat((mask, mask.new_ones(3, column - 40)), dim=1)))
        difference = torch.stack(found).double() - torch.stack(whole.logits)
        return difference.square().mean().sqrt()

    def stepped(model: Any) -> Any:
        state: dict[str, Any] = {}

        def step(ids: Tensor, mask: Tensor) -> Tensor:
            new = ids if not state else ids[:, -1:]
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            with torch.no_grad():
                out = model(input_ids=new, attention_mask=mask, position_ids=positions, use_cache=True, **state)
            state["past_key_values"] = out.past_key_values
            return out.logits[:, -1]

        return step

    own_model = model_of(name, torch.bfloat16)
    own_model.load_state_dict(narrow.state_dict())
    plain = errors(stepped(narrow))
    with megakv.init_inference(own_model, {"dtype": "bf16"}) as engine:
        own = errors(stepped(engine.module))
    assert len(steps) == len(set(steps)) * (NEW - 1)
    assert own <= 1.25 * plain


def test_forks_and_cut_sessions_go_on_each_with_its_own_rows(steps: list[int]) -> None:
    model, ids = model_of("mistral"), torch.randint(3, families.VOCAB, (1, 30))
    options = {"max_new_tokens": 9, "do_sample": False}
    turns = [torch.randint(3, families.VOCAB, (1, length)) for length in (1, 5, 2)]

    def plain(*given: Tensor) -> Tensor:
        tokens = torch.zeros(1, 0, dtype=torch.long)
        for turn in given:
            tokens = model.generate(torch.cat((tokens, turn), dim=1), **options)
        return tokens

    with megakv.init_inference(model_of("mistral"), {"dtype": "fp32"}) as engine:
        session = engine.session()
        whole = session.generate(ids, **options)
        fork = session.fork()
        length = whole.shape[1]
        for turn in turns:
            expected = plain(ids, turn)
            for each in (session, fork):
                assert torch.equal(each.generate(turn, **options)[:, -9:], expected[:, -9:])
                each.cut_back(length)
        assert torch.equal(whole[:, -9:], plain(ids)[:, -9:])
    assert steps


def test_after_a_pass_that_failed_its_rows_are_gone(steps: list[int]) -> None:
    ids = torch.randint(3, families.VOCAB, (2, 30))
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model_of("llama").generate(ids, **options)
    with megakv.init_inference(model_of("llama"), {"dtype": "fp32"}) as engine:
        session = engine.session()
        session.generate(ids, **options)
        session.cut_back(30)
        handle = engine.module.model.layers[1].mlp.register_forward_hook(failing(after=4))
        with pytest.raises(RuntimeError, match="on purpose"):
            session.generate(expected[:, 30:31], **options)
        handle.remove()
        session.cut_back(30)
        found = session.generate(expected[:, 30:31], max_new_tokens=11, do_sample=False)
    assert torch.equal(found[:, -11:], expected[:, -11:])
    assert steps


def failing(after: int) -> Any:
    calls = [0]

    def hook(*_: Any) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise RuntimeError("on purpose")

    return hook
