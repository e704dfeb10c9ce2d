"""Modules with quantised weights compute what they compute themselves, or a setting is refused by its name."""

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import megakv
from megakv.engine.loading import build_model
from megakv.offload.config import OffloadConfig
from megakv.weights.fingerprint import module_digests, plain_parts
from megakv.weights.quantised import is_plain_linear, quantised_by
from tests.families import FAMILIES, llama
from tests.quantised_modules import WAYS, quantised

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
RECOMPUTED = {"offload": {"enabled": True, "host_gb": 0.05, "page_kib": 8}}
NAMES = {
    "subclass": "model.layers.0.self_attn.q_proj.weight is a Scaled of torch.float32",
    "state": "model.layers.0.self_attn.q_proj.weight is a StateParameter of torch.int8",
    "packed": "model.layers.0.self_attn.q_proj.qweight is a Tensor of torch.int32",
    "byte": "model.layers.0.self_attn.q_proj.weight is a Parameter of torch.float8_e4m3fn",
    "unpacked": "model.layers.0.self_attn.q_proj.weight_packed is a Parameter of torch.int32",
}


def make(way: str, config: Any = None) -> PreTrainedModel:
    """A small model, wide enough for the kernels that plain linears get."""
    torch.manual_seed(0)
    config = config or llama(hidden_size=256, intermediate_size=256, head_dim=32)
    return quantised(AutoModelForCausalLM.from_config(config, dtype=torch.float32), way)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", WAYS)
def test_they_are_kept_as_they_are(way: str) -> None:
    ids, model = torch.randint(3, 99, (1, 40)), make(way)
    with torch.no_grad():
        expected, logits = make(way).generate(ids, **GREEDY), make(way)(ids).logits
    before = dict(model.named_parameters())
    digests = []
    for section in ({}, RECOMPUTED):
        with megakv.init_inference(model, {"megakv": section}) as engine:
            assert torch.equal(engine.generate(ids, **GREEDY), expected)
            assert torch.allclose(engine(ids).logits, logits, atol=1e-4)
            digests.append(engine.weights_digest)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items() if way != "unpacked")
    assert digests[0] == digests[1]
    # The smallest change of one weight, wherever it is kept, is another model.
    held = [part for tensor in (*model.parameters(), *model.buffers()) for part in plain_parts(tensor)]
    changed = next(
        part for part in held if part.dtype in (torch.int8, torch.int32, torch.float8_e4m3fn) or way == "unpacked"
    )
    with torch.no_grad():
        changed.view(-1)[-1:].view(torch.uint8)[:1] ^= 1
    with megakv.init_inference(model, {}) as engine:
        assert engine.weights_digest != digests[0]


@pytest.mark.usefixtures("alone")
def test_latents_that_they_expand_themselves() -> None:
    """What expands them is multiplied with by MegaKV where it is a plain linear alone."""
    ids = torch.randint(3, 99, (1, 40))
    with torch.no_grad():
        expected = make("subclass", FAMILIES["deepseek_v3"]()).generate(ids, **GREEDY)
    with megakv.init_inference(make("subclass", FAMILIES["deepseek_v3"]()), {}) as engine:
        assert torch.equal(engine.generate(ids, **GREEDY), expected)


@pytest.mark.parametrize("way", WAYS)
def test_what_would_cut_them_is_refused_by_name(way: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "tensor_parallel.tp_size = 2": {"tp_size": 2, "tp_rank": 1},
        "megakv.weights.format = 'fp8'": {"weights": "fp8"},
        "megakv.offload.weights = true": {"offload": OffloadConfig(enabled=True, host_gb=1, weights=True)},
        "dtype = torch.bfloat16": {"dtype": torch.bfloat16},
    }
    model = make(way)
    expected = module_digests(model)
    for setting, given in settings.items():
        with pytest.raises(
            ValueError, match=f"{re.escape(setting)} is not supported for the model given, whose"
        ) as info:
            build_model(model, **{"dtype": None, **given}, all_reduce=lambda tensor: tensor)
        assert NAMES[way] in str(info.value) and len(str(info.value)) < 400
    # Nothing was touched before.
    assert module_digests(model) == expected


def test_plain_models_are_none_of_them() -> None:
    for name, make_config in FAMILIES.items():
        model = AutoModelForCausalLM.from_config(make_config(), dtype=torch.bfloat16)
        assert quantised_by(model) is None, name


def test_fast_paths_take_plain_linears_alone() -> None:
    for way, change in WAYS.items():
        assert not is_plain_linear(change(torch.nn.Linear(8, 8, bias=False))), way
    plain = torch.nn.Linear(8, 8)
    assert is_plain_linear(plain)
    plain.quantization_scheme = None
    assert not is_plain_linear(plain) and not is_plain_linear(torch.nn.Bilinear(8, 8, 8))


def test_weights_that_cannot_be_read_are_refused() -> None:
    """Such as those of torch's own dynamic quantisation."""
    model = make("packed")
    model.model.layers[1].mlp.up_proj.packed = torch.ops.quantized.linear_prepack(
        torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8), None
    )
    with pytest.raises(
        ValueError, match="keeps model.layers.1.mlp.up_proj .PackedLinear. in a way that cannot be read"
    ):
        build_model(model, dtype=None, all_reduce=lambda tensor: tensor)
