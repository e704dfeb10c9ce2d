"""What somebody changes of layers that go by compiled calls, or hears of them, before and while an engine has them."""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, LogitsProcessor
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

import megakv
from tests.families import FAMILIES
from tests.unit.injection.compiled_layers import model_of, tokens


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


def test_somebody_s_hooks_on_a_layer_are_heard(calls: list[int]) -> None:
    """They see what comes from the layers before, each of which is a call of its own then."""
    ids, seen = torch.randint(3, 100, (1, 30)), list[tuple[Tensor, Tensor]]()
    with megakv.init_inference(model_of("llama"), {"dtype": "fp32"}) as engine:
        plain = tokens(engine, ids)
        first, second = engine.module.model.layers
        handles = [
            first.register_forward_hook(lambda _module, _inputs, out: seen.append((out, out))),
            second.register_forward_pre_hook(lambda _module, inputs: seen.append((seen[-1][1], inputs[0]))),
        ]
        calls.clear()
        assert tokens(engine, ids) == plain
        assert calls == [1] * 22 and len(seen) == 24
        assert all(torch.equal(gave, got) for gave, got in seen[1::2])
        for handle in handles:
            handle.remove()
        handle = second.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 3, *inputs[1:]))
        assert tokens(engine, ids) != plain
        handle.remove()
        calls.clear()
        assert tokens(engine, ids) == plain and calls == [2] * 22


class Doubled(nn.Module):
    """In the place of a layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return 2 * self.layer(*arguments, **options)


class Left(nn.Module):
    """A layer that is left out."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return hidden_states


def around_forward(model: Any) -> None:
    before = model.model.layers[1].forward
    model.model.layers[1].forward = lambda x, *arguments, **options: 2 * before(x, *arguments, **options)


def no_forward(model: Any) -> None:
    model.model.layers[1].forward = lambda hidden_states, *_arguments, **_options: hidden_states


def other_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 3


def other_order(model: Any) -> None:
    first, second, third = model.model.layers
    model.model.layers = nn.ModuleList([second, first, third])


def fewer_layers(model: Any) -> None:
    model.config.num_hidden_layers = 2


def pruned(model: Any) -> None:
    model.model.layers = model.model.layers[:2]


def around_layer(model: Any) -> None:
    model.model.layers[1] = Doubled(model.model.layers[1])


def left_out(model: Any) -> None:
    model.model.layers[1] = Left()


def compiled(model: Any) -> None:
    layer = model.model.layers[1]
    layer._compiled_call_impl = lambda *arguments, **options: 2 * layer._call_impl(*arguments, **options)


class Twice(LlamaDecoderLayer):
    """The same layer, by somebody else's code."""

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return 2 * super().forward(*arguments, **options)


class Louder(LlamaAttention):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        out, *others = super().forward(*arguments, **options)
        return 3 * out, *others


def other_class(model: Any) -> None:
    model.model.layers[1].__class__ = Twice


def other_attention(model: Any) -> None:
    model.model.layers[1].self_attn.__class__ = Louder


def heard_everywhere(model: Any) -> None:
    layer = model.model.layers[1]
    model.handle = register_module_forward_hook(lambda module, _inputs, out: 2 * out if module is layer else None)


class At(LogitsProcessor):
    """Does something before a token."""

    def __init__(self, token: int, change: Callable[[], None]):
        self.left, self.change = token, change

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.change()
        return scores


AT_ANY_TIME = (
    around_forward, no_forward, other_scale, other_order, fewer_layers, pruned, around_layer, left_out, compiled,
    heard_everywhere, other_class, other_attention,
)  # fmt: skip


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("change", AT_ANY_TIME)
def test_what_calls_layers_may_change_at_any_time(
    calls: list[int], change: Callable[[Any], None], within: bool
) -> None:
    """Between calls, and within one: tokens are those of transformers' model, changed then."""
    config, ids = FAMILIES["llama"](), torch.randint(3, 100, (1, 30))
    config.num_hidden_layers = 3

    def found(model: Any, served: Any) -> list[int]:
        at = At(5, lambda: change(model))
        if not within:
            change(model)
        try:
            processors = [at] if within else []
            return served.generate(ids, max_new_tokens=16, do_sample=False, logits_processor=processors)[0].tolist()
        finally:
            if hasattr(model, "handle"):
                model.handle.remove()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    other = copy.deepcopy(model)
    expected = found(model, model)
    with megakv.init_inference(other, {"dtype": "fp32"}) as engine:
        tokens(engine, ids)
        assert set(calls) == {3}
        assert found(engine.module, engine) == expected


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


def replaced(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight = nn.Parameter(-2 * layer.self_attn.q_proj.weight.detach())
        layer.mlp.up_proj = Grown(layer.mlp.up_proj)


@pytest.mark.parametrize("before", ["forward", "generate", "extend"])
@pytest.mark.parametrize("length", [1, 2, 10])
def test_weights_that_are_replaced_between_prompts_of_few_tokens_count(
    calls: list[int], before: str, length: int
) -> None:
    """In whatever way the model is called."""
    ids, model = torch.randint(3, 100, (1, length)), model_of("llama")
    with torch.no_grad(), megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"}) as engine:
        match before:
            case "forward":
                engine.module(ids)
            case "generate":
                tokens(engine, ids)
            case "extend":
                engine.extend([engine.new_cache()], [ids[0]])
        assert calls
        for each in (engine.module, model):
            replaced(each)
        expected = model(ids).logits
        torch.testing.assert_close(engine.module(ids).logits, expected, rtol=1e-3, atol=1e-4)
        extended = engine.extend([engine.new_cache()], [ids[0]])
        torch.testing.assert_close(extended, expected[:, -1], rtol=1e-3, atol=1e-4)


def test_a_forward_of_somebody_s_own_is_run(calls: list[int]) -> None:
    model = model_of("llama")
    own = model.model.layers[0].mlp
    own.forward = lambda x: x * 0
    with megakv.init_inference(model, {"dtype": "fp32"}) as engine:
        tokens(engine, torch.randint(3, 100, (1, 30)))
    assert len(calls) == 11
    assert "forward" in vars(own)


class Grown(nn.Module):
    """Around a linear, as adapters are."""

    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.inner(x)


def wrap_forward(layer: Any) -> None:
    """A class of the same code, but for what is put around it."""

    class Another(type(layer.mlp)):  # type: ignore[misc]
        @functools.wraps(type(layer.mlp).forward)
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    layer.mlp.__class__ = Another


def call_otherwise(layer: Any) -> None:
    class Another(type(layer.input_layernorm)):  # type: ignore[misc]
        def __call__(self, x: Tensor) -> Tensor:
            return 3 * super().__call__(x)

    layer.input_layernorm.__class__ = Another


def transposed(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().t().contiguous().t(), requires_grad=False)


CHANGES: dict[str, Callable[[Any], object]] = {
    "an adapter": lambda layer: setattr(layer.mlp, "up_proj", Grown(layer.mlp.up_proj)),
    "another module": lambda layer: setattr(layer, "mlp", nn.Linear(64, 64)),
    "a forward": lambda layer: setattr(layer.mlp, "forward", lambda x: 3 * type(layer.mlp).forward(layer.mlp, x)),
    "an activation": lambda layer: setattr(layer.mlp, "act_fn", nn.Tanh()),
    "a clipped activation": lambda layer: setattr(layer.mlp, "act_fn", ACT2FN["gelu_10"]),
    "a number": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 2.0),
    "a bias": lambda layer: setattr(layer.mlp.down_proj, "bias", nn.Parameter(torch.ones(64), requires_grad=False)),
    "no bias": lambda layer: setattr(layer.self_attn.q_proj, "bias", None),
    "a transposed weight": lambda layer: setattr(layer.mlp.up_proj, "weight", transposed(layer.mlp.up_proj.weight)),
    "a norm that is spread": lambda layer: setattr(
        layer.input_layernorm, "weight", nn.Parameter(torch.ones(1).expand(64), requires_grad=False)
    ),
    "a parametrization": lambda layer: parametrize.register_parametrization(layer.mlp.up_proj, "weight", nn.Tanh()),
    "a wrapped forward": wrap_forward,
    "another call": call_otherwise,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("after", [False, True])
def test_what_somebody_changes_counts(calls: list[int], name: str, after: bool) -> None:
    """Before an engine is made of the model, or while it has it: in decoding as in prompts."""
    ids, plain, model = torch.randint(3, 100, (1, 30)), model_of("qwen2"), model_of("qwen2")
    # Large enough to reach what activations differ in.
    for each in (plain, model):
        each.model.layers[0].mlp.gate_proj.weight.data *= 20
    settings: dict[str, Any] = {
        "max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    torch.manual_seed(1)
    CHANGES[name](plain.model.layers[0])
    expected = plain.generate(ids, **settings)
    torch.manual_seed(1)
    if not after:
        CHANGES[name](model.model.layers[0])
    with megakv.init_inference(model, {"dtype": "fp32"}) as engine:
        if after:
            tokens(engine, ids)
            torch.manual_seed(1)
            CHANGES[name](model.model.layers[0])
        found = engine.generate(ids, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)


def test_a_class_that_is_patched_runs_what_it_was_given(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do who know whole families to be faster."""
    ids, before = torch.randint(3, 100, (1, 30)), LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 3 * before(self, x))
    expected = tokens(model_of("llama"), ids)
    with megakv.init_inference(model_of("llama"), {"dtype": "fp32"}) as engine:
        assert tokens(engine, ids) == expected
    assert not calls


def test_global_hooks_are_heard(calls: list[int]) -> None:
    ids, seen = torch.randint(3, 100, (1, 30)), list[str]()
    with megakv.init_inference(model_of("llama"), {"dtype": "fp32"}) as engine:
        handle = register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
        tokens(engine, ids)
        handle.remove()
    assert seen.count("LlamaMLP") == 12 * 2
    assert not calls


def test_one_layer_in_two_places_is_given_back(calls: list[int]) -> None:
    model = model_of("llama")
    model.model.layers[1] = model.model.layers[0]
    with contextlib.suppress(Exception), megakv.init_inference(model, {"dtype": "fp32"}) as engine:
        tokens(engine, torch.randint(3, 100, (1, 30)))
    assert not any("forward" in vars(module) for module in model.modules())
