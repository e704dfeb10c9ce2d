"""Which decoder layers go by compiled calls, and that nothing but time changes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import megakv
from megakv.attention.layer import LayerCalls, load_layer
from megakv.injection.token_layers import is_known
from tests.families import FAMILIES

KNOWN = {"llama", "llama3_rope", "llama_dynamic_rope", "llama_mqa", "llama_tied", "mistral", "qwen2", "qwen3"}


@pytest.fixture
def calls(alone: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for every layer that was computed so."""
    if load_layer()[0] is None:
        pytest.skip(f"no compiled kernel: {load_layer()[1]}")
    taken: list[int] = []
    feed_forward = LayerCalls.feed_forward

    def noted(self: LayerCalls, x: Tensor, *arguments: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        taken.append(len(x))
        return feed_forward(self, x, *arguments, **settings)

    monkeypatch.setattr(LayerCalls, "feed_forward", noted)
    return taken


def model_of(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[name](**changes), dtype=torch.float32).eval()


def tokens(model: Any, ids: Tensor) -> list[int]:
    return model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_layers_whose_code_is_another_are_left_alone(name: str) -> None:
    if load_layer()[0] is None:
        pytest.skip(f"no compiled kernel: {load_layer()[1]}")
    layers = [layer for layer in model_of(name).base_model.modules() if hasattr(layer, "input_layernorm")]
    found = [is_known(layer) for layer in layers]
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
        layers = [layer for layer in engine.module.model.layers if "forward" in vars(layer)]
        assert len(layers) == len(engine.module.model.layers)
    assert len(calls) == 11 * len(layers)
    assert not any("forward" in vars(module) for module in engine.module.modules())


def test_somebody_s_hooks_within_a_layer_are_heard(calls: list[int]) -> None:
    ids, seen = torch.randint(3, 100, (1, 30)), []
    with megakv.init_inference(model_of("llama"), {"dtype": "fp32"}) as engine:
        plain = tokens(engine, ids)
        assert len(calls) == 22
        norm = engine.module.model.layers[1].post_attention_layernorm
        handle = norm.register_forward_hook(lambda *found: seen.append(found[2]))
        assert tokens(engine, ids) == plain
        assert len(calls) == 33 and len(seen) == 12
        handle.remove()
        # What it changes counts too.
        handle = norm.register_forward_hook(lambda _module, _inputs, out: out * 3)
        changed = tokens(engine, ids)
        handle.remove()
        assert tokens(engine, ids) == plain != changed


def test_other_weights_are_taken(calls: list[int]) -> None:
    """Whether in their place, in other memory, or as other parameters."""
    ids = torch.randint(3, 100, (1, 30))
    with megakv.init_inference(model_of("qwen3"), {"dtype": "fp32"}) as engine:
        layer = engine.module.model.layers[0]
        tokens(engine, ids)
        with torch.no_grad():
            layer.mlp.up_proj.weight.mul_(2)
        layer.self_attn.k_norm.weight.data = layer.self_attn.k_norm.weight.data * 1.5
        layer.self_attn.o_proj.weight = nn.Parameter(layer.self_attn.o_proj.weight * 0.5, requires_grad=False)
        calls.clear()
        found = tokens(engine, ids)
        assert len(calls) == 22
        state = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    plain = model_of("qwen3")
    plain.load_state_dict(state)
    assert found == tokens(plain, ids)


def test_a_forward_of_somebody_s_own_is_run(calls: list[int]) -> None:
    model = model_of("llama")
    own = model.model.layers[0].mlp
    own.forward = lambda x: x * 0
    with megakv.init_inference(model, {"dtype": "fp32"}) as engine:
        tokens(engine, torch.randint(3, 100, (1, 30)))
    assert len(calls) == 11
    assert "forward" in vars(own)
