"""Every causal language model that transformers knows: the plain model's results, or a refusal by name at start."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

import megakv
from megakv.engine.loading import build_model
from megakv.injection.interface import ATTEND_ATTRIBUTE
from megakv.offload.weights import ALIGNMENT, layer_places
from megakv.planner.dry_run import dry_run
from megakv.weights.placement.attention import attention_modules
from tests.tiny_configs import FAMILIES, VOCAB, tiny_config

# What cannot be had in tiny, and why.
UNBUILT = {
    "dots3_note": "its adapters ask for the sizes of the whole model",
    "gemma3n": "needs timm",
    "gemma4_assistant": "its own default is refused by its own check",
    "musicgen": "the causal model does not take its own configuration",
    "musicgen_melody": "the causal model does not take its own configuration",
}
# What MegaKV cannot serve, by the reason it gives.
_REASONS = {
    "has no attention that MegaKV knows": """
        bamba big_bird git gpt_neo granitemoehybrid jamba lfm2 lfm2_moe lfm3 nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe
        qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma zamba zamba2""",
    "keeps a state of its own beside attention": """
        axk2 deepseek_v32 deepseek_v4 dots3_note_text falcon_h1 glm_moe_dsa hy_v4 inkling2_text inkling_text
        zaya""",
    "mixes tokens beside attention": "bailing_hybrid kimi_linear",
    "its forward takes no ": """
        bart bigbird_pegasus blenderbot blenderbot-small cpmant falcon_mamba gemma4_unified_assistant mamba mamba2
        marian mbart mvp openai-gpt pegasus plbart prophetnet reformer roformer rwkv trocr xlm xlnet xlstm""",
    "do not use transformers' attention interface": "codegen gpt_neox_japanese jetmoe megatron-bert rembert xglm",
    "attention is called 6 times for 3 decoder layers": "diffllama",
    "the model's attention mask is not a function of slots alone": "gemma4_unified",
    "its forward pass fails with MegaKV's attention and cache": "doge minimax xmod",
    "MegaKV finds attention in ": "hrm_text longcat_flash",
    "its config names no number of hidden layers": "blt",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
# Its decoder is in the place of the whole model, where layers are not looked for.
NOT_OFFLOADED = ("modernbert-decoder",)
# Older versions of transformers wrote these otherwise: no configuration to shrink, or another way to attend.
VARIES = "cohere_compass_text gemma4_unified_assistant megatron-bert moshi qwen4_exp qwen4_exp_text rembert".split()
BATCH, LENGTH = 3, 21


def make_model(model_type: str) -> PreTrainedModel:
    """Random weights, norms and biases moved off their neutral values."""
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def answers(model: PreTrainedModel, *, use_cache: bool) -> dict[str, Tensor]:
    """Logits of one prompt and of a ragged batch, and tokens generated from it."""
    numbers = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=numbers)
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, :20] = 0, 0
    ids = ids * mask
    with torch.no_grad():
        return {
            "one": model(input_ids=ids[2:]).logits,
            "ragged": model(input_ids=ids, attention_mask=mask).logits[mask.bool()],
            "tokens": model.generate(
                ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=use_cache
            ),
        }


def late_uses(engine: Any) -> list[str]:
    """Modules whose weights may be overwritten once their layer has attended, and that are called after it.

    The list grows with every pass of the engine.
    """
    model = engine.module
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    attend, attended, found = engine._runtime.attend, set(), []

    def noted(layer: int, *args: Any) -> Tensor:
        attended.add(layer)
        return attend(layer, *args)

    def check(name: str, layer: int) -> None:
        if layer in attended:
            found.append(name)

    for layer, places in enumerate(layer_places(model, dtypes)):
        for place in places.places:
            if place.offset < places.keys_rows * ALIGNMENT:
                owner = model.get_submodule(place.name.rpartition(".")[0])
                owner.register_forward_pre_hook(lambda *_, name=place.name, layer=layer: check(name, layer))
    model.register_forward_pre_hook(lambda *_: attended.clear())
    for module in attention_modules(model):
        setattr(module, ATTEND_ATTRIBUTE, noted)
    return found


@pytest.mark.drawn(50)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_right_or_refused(model_type: str, alone: None) -> None:
    try:
        model = make_model(model_type)
    except Exception as error:  # a family that is new here must be looked at
        print(f"{model_type}: {type(error).__name__}: {error}")
        assert model_type in UNBUILT or model_type in VARIES
        return
    plain = copy.deepcopy(model)
    before = copy.deepcopy(model.config)
    try:
        engine = megakv.init_inference(model, {"dtype": "fp32"})
    except ValueError as error:
        assert f"model type {model.config.model_type!r} ({type(model).__name__}) is not supported: " in str(error)
        assert model_type in VARIES or REFUSED[model_type] in str(error)
        assert model.config._attn_implementation == before._attn_implementation
        assert not any(hasattr(module, ATTEND_ATTRIBUTE) for module in model.modules())
        return
    assert model_type in VARIES or model_type not in REFUSED
    try:
        early = [] if model_type in NOT_OFFLOADED else late_uses(engine)
        found = answers(engine, use_cache=True)
    finally:
        engine.destroy()
    # A cache of transformers' own may lose what the model's mask shows (Moshi's).
    wanted = answers(plain, use_cache=False)
    for name in ("one", "ragged"):
        assert (found[name] - wanted[name]).abs().max() <= 1e-4 * wanted[name].abs().max(), name
    assert torch.equal(found["tokens"], wanted["tokens"])
    assert not early, "these come too early with offload.weights"


def test_the_list_of_the_refused_is_kept_in_order() -> None:
    """Each name once: a family that can be served must not stay on a list that excuses it."""
    names = [name for names in _REASONS.values() for name in names.split()]
    assert len(names) == len(set(names)) and not set(names) & set(UNBUILT)


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "falcon_h1", "gemma4_unified"])
def test_refused_before_weights_are_read(model_type: str, tmp_path: Path) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    refusal = f"model type {model_type!r} .* is not supported: .*{REFUSED[model_type]}"
    with pytest.raises(ValueError, match=refusal):
        build_model(tmp_path, dtype=None, all_reduce=lambda tensor: tensor)
    with pytest.raises(ValueError, match=refusal):
        dry_run(tmp_path, {"dtype": "fp32"}, context=16)


def test_a_module_that_generates_no_text_is_refused(alone: None) -> None:
    config = tiny_config("llama")
    for kind in (AutoModelForSequenceClassification, AutoModel):
        model = kind.from_config(config)
        reason = rf"\({type(model).__name__}\) is not supported: it generates no text; load the model by AutoModelForC"
        with pytest.raises(ValueError, match=reason):
            megakv.init_inference(model, {"dtype": "fp32"})


def test_a_module_that_an_engine_had_can_be_given_again(alone: None) -> None:
    model = make_model("falcon")
    for _ in range(2):
        megakv.init_inference(model, {"dtype": "fp32"}).destroy()
