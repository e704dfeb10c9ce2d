"""Which decoder layers go by compiled calls, and that nothing but time changes."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

import megakv
from megakv.attention.layer import load_layer
from megakv.injection import layer_kind
from megakv.injection.interface import CausalMask
from megakv.injection.layer_kind import activation, settings
from megakv.weights.products import Products
from tests.families import FAMILIES
from tests.pairs import without_pairs
from tests.unit.injection.compiled_layers import model_of, tokens

KNOWN = {"llama", "llama3_rope", "llama_dynamic_rope", "llama_mqa", "llama_tied", "mistral", "qwen2", "qwen3"}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_layers_whose_code_is_another_are_left_alone(name: str) -> None:
    if load_layer()[0] is None:
        pytest.skip(f"no compiled kernel: {load_layer()[1]}")
    layers = [layer for layer in model_of(name).base_model.modules() if hasattr(layer, "input_layernorm")]
    found = [settings(layer) is not None for layer in layers]
    # Of some that have experts, one layer has none.
    dense = name == "qwen3_moe"
    assert found == [name in KNOWN or (dense and not index) for index in range(len(layers))]
    assert found or name not in KNOWN


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_tokens_are_transformers_own(calls: list[int], name: str) -> None:
    ids = torch.randint(3, 100, (1, 60))
    expected = tokens(model_of(name), ids)
    with megakv.init_inference(model_of(name), {"dtype": "fp32"}) as engine:
        assert tokens(engine, ids) == expected
        layers = engine.module.model.layers
        assert all("forward" in vars(layer) for layer in layers)
    assert calls == [len(layers)] * 11 * len(layers)
    assert not any("forward" in vars(module) for module in engine.module.modules())


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_prompts_and_candidates_of_few_tokens_are_one_call_too(calls: list[int], name: str) -> None:
    """What is cached before them, or nothing; in a batch, with padding."""
    model = model_of(name)
    ids, layers = torch.randint(3, 100, (1, 9)).repeat(1, 3), len(model.model.layers)
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[1, :3] = mask[2, :1] = 0
    batch = torch.randint(3, 100, (3, 5))
    expected, several = tokens(model, ids), tokens(model, ids[:, :14])
    padded = model.generate(batch, attention_mask=mask, max_new_tokens=5, do_sample=False)
    with megakv.init_inference(model, {"dtype": "fp32"}) as engine:
        assert tokens(engine, ids[:, :14]) == several
        assert calls == [layers] * 12 * layers
        calls.clear()
        found = engine.generate(batch, attention_mask=mask, max_new_tokens=5, do_sample=False)
        assert torch.equal(found, padded) and calls == [layers] * 5 * layers
        if name != "llama_dynamic_rope":
            calls.clear()
            out = engine.generate(ids, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
            assert out[0].tolist() == expected
            # All but the prompt, of more tokens than that.
            assert calls == [layers] * (engine.report().candidates.steps - 1) * layers
        calls.clear()
        session = engine.session()
        first = session.generate(ids, max_new_tokens=3, do_sample=False)
        turn = session.generate(ids[:, :11], max_new_tokens=5, do_sample=False)
        assert calls == [layers] * (2 + 5) * layers
    whole = torch.cat((first, ids[:, :11]), 1)
    assert turn[0].tolist() == model.generate(whole, max_new_tokens=5, do_sample=False)[0].tolist()


@pytest.mark.parametrize("products", [Products(most_rows=256)], indirect=True)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_prompts_of_some_hundred_tokens_are_one_call_where_products_are_as_fast(
    calls: list[int], products: Products, name: str
) -> None:
    model = model_of(name)
    ids, layers = torch.randint(3, 100, (1, products.most_rows - 1)), len(model.model.layers)
    expected = tokens(model, ids[:, :150]), model.generate(ids, max_new_tokens=9, do_sample=False)
    with megakv.init_inference(model, {"dtype": "fp32"}) as engine:
        assert tokens(engine, ids[:, :150]) == expected[0]
        assert calls == [layers] * 12 * layers
        session = engine.session()
        session.generate(ids[:, :40], max_new_tokens=1, do_sample=False)
        session.cut_back(40)
        assert torch.equal(session.generate(ids[:, 40:], max_new_tokens=9, do_sample=False), expected[1])


@pytest.mark.parametrize("products", [Products(fuses=True)], indirect=True)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_prompts_of_more_tokens_are_one_call_where_layers_are_fused(calls: list[int], name: str) -> None:
    """Their feed-forward in blocks of rows; still more go through layers one by one."""
    model = model_of(name)
    layers = len(model.model.layers)
    for length in (700, 1030):
        ids = torch.randint(3, 100, (1, length))
        expected = tokens(model, ids)
        calls.clear()
        with megakv.init_inference(model, {"dtype": "fp32"}) as engine:
            assert tokens(engine, ids) == expected
        assert calls == [layers] * (12 if length == 700 else 11) * layers


@pytest.mark.parametrize("products", [Products(256), Products(256, pairs=True)], indirect=True, ids=["wide", "pairs"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_in_bf16_prompts_are_as_exact_as_transformers(calls: list[int], products: Products, name: str) -> None:
    if products.pairs and (reason := without_pairs()):
        pytest.skip(reason)
    model, ids = model_of(name).bfloat16(), torch.randint(3, 100, (1, 200))
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(ids).logits
        plain = (model(ids).logits.double() - expected).square().mean().sqrt()
        with megakv.init_inference(model, {"dtype": "bf16"}) as engine:
            own = (engine(ids).logits.double() - expected).square().mean().sqrt()
    assert calls and own <= 1.05 * plain


class AnotherLoop(Qwen2Model):
    """The same, by somebody else's code."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return super().forward(*arguments, **options)


@pytest.mark.parametrize("kind", ["other masks", "another loop", "an earlier layer of another kind"])
def test_layers_that_need_not_follow_one_another_are_calls_of_their_own(calls: list[int], kind: str) -> None:
    config = FAMILIES["qwen2"]()
    if kind == "other masks":
        config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], 7
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if kind == "another loop":
        model.model.__class__ = AnotherLoop
    if kind == "an earlier layer of another kind":
        model.model.layers[0].mlp.act_fn = nn.Tanh()
    ids = torch.randint(3, 100, (1, 30))
    expected = tokens(model, ids)
    with megakv.init_inference(model, {"dtype": "fp32"}) as engine:
        assert tokens(engine, ids) == expected
    assert set(calls) == {1}


def test_activations_of_other_classes_are_unknown() -> None:
    """That is no error: the layer is PyTorch's."""
    assert activation(nn.PReLU(dtype=torch.bfloat16)) is None
    known = {"silu": 0, "swish": 0, "gelu": 1, "gelu_pytorch_tanh": 2}
    for name in ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", "gelu_10", "quick_gelu", "mish"):
        assert activation(ACT2FN[name]) == known.get(name), name
    noted = nn.SiLU()
    noted.notes = ["of somebody's own"]
    assert activation(noted) == 0


def louder(forward: Any) -> Any:
    return lambda self, x: 3 * forward(self, x)


def farther(forward: Any) -> Any:
    """Far into a prompt queries are scaled, as some families do."""

    def scaled(self: Any, hidden_states: torch.Tensor, *given: Any, position_ids: torch.Tensor, **others: Any) -> Any:
        far = (position_ids > 8000)[..., None]
        return forward(self, torch.where(far, 2 * hidden_states + 1, hidden_states), *given, **others)

    return scaled


def narrower(forward: Any) -> Any:
    """Without a word to the one who makes masks."""
    return lambda self, *given, attention_mask, **others: forward(self, *given, attention_mask=CausalMask(), **others)


@pytest.mark.parametrize(
    ("kind", "around"), [(LlamaMLP, louder), (LlamaAttention, farther), (LlamaAttention, narrower)]
)
def test_a_probe_says_no_where_layers_do_something_else(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Any, around: Any
) -> None:
    """Of classes and settings that are known, as of another version of transformers."""
    monkeypatch.setattr(layer_kind, "_is_own", lambda function: True)
    monkeypatch.setattr(kind, "forward", around(kind.forward))
    model, ids = model_of("llama"), torch.randint(3, 100, (1, 40))
    assert settings(model.model.layers[0]) is not None
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist() if around is louder else None
    with megakv.init_inference(model, {"dtype": "fp32"}) as engine:
        found = tokens(engine, ids)
    assert not calls and expected in (None, found)
    assert "LlamaDecoderLayer is PyTorch's: compiled calls give other results" in caplog.text
