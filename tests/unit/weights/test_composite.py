"""Models of images and text, as folders and modules: answered as text like the plain model, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, CLIPConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama4.configuration_llama4 import Llama4Config
from transformers.models.llava.configuration_llava import LlavaConfig
from transformers.models.mistral3.configuration_mistral3 import Mistral3Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

import megakv
from megakv.costmodel.shape import ModelShape
from megakv.planner.dry_run import dry_run
from tests.tiny_configs import VOCAB, tiny_config

IMAGE = VOCAB - 1
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}


def _text(model_type: str) -> dict[str, Any]:
    return tiny_config(model_type).to_dict()


def llava() -> PreTrainedConfig:
    vision = {**VISION, "model_type": "clip_vision_model", "projection_dim": 32}
    return LlavaConfig(text_config=_text("llama"), vision_config=vision, image_token_index=IMAGE)


def mistral3() -> PreTrainedConfig:
    vision = {**VISION, "model_type": "pixtral", "head_dim": 16}
    return Mistral3Config(text_config=_text("mistral"), vision_config=vision, image_token_index=IMAGE)


def qwen3_vl() -> PreTrainedConfig:
    sizes = {name: value for name, value in _text("qwen3").items() if name in QWEN3_SIZES}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    ids = {"image_token_id": IMAGE, "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95}
    vision = {**QWEN_VISION, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config={**sizes, "rope_parameters": rope}, vision_config=vision, **ids)


QWEN3_SIZES = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
    "max_position_embeddings initializer_range pad_token_id bos_token_id eos_token_id"
).split()


def saved(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def prompts() -> tuple[Tensor, Tensor]:
    """A batch with padding on the left."""
    ids, mask = torch.randint(3, 90, (2, 21)), torch.ones(2, 21, dtype=torch.long)
    mask[0, :6] = 0
    return ids, mask


@pytest.mark.parametrize("make", [llava, mistral3, qwen3_vl])
@pytest.mark.parametrize("folder", [True, False])
def test_text_is_answered_as_by_the_whole_model(make: Any, folder: bool, alone: None, tmp_path: Path) -> None:
    plain = saved(make(), tmp_path)
    ids, mask = prompts()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    wanted = plain.generate(ids, **options)
    with torch.no_grad():
        logits = plain(ids, attention_mask=mask).logits
    with megakv.init_inference(tmp_path if folder else plain, {"dtype": "fp32"}) as engine:
        assert torch.equal(engine.generate(ids, **options), wanted)
        found = engine(ids, attention_mask=mask).logits
        assert torch.allclose(found[mask.bool()], logits[mask.bool()], atol=1e-4)
        with pytest.raises(ValueError, match="pixel_values is not supported with MegaKV: MegaKV reads text alone"):
            engine(ids, pixel_values=torch.zeros(1, 3, 28, 28))
        if make is qwen3_vl:
            positions = torch.arange(21).expand(4, 2, 21).clone()
            positions[1, 0, 9] += 1
            with pytest.raises(ValueError, match=r"position_ids \[4, 2, 21\] are those of images or videos"):
                engine(ids, position_ids=positions)
    if folder:
        assert dry_run(tmp_path, {"dtype": "fp32"}, context=16).parameters == sum(p.numel() for p in plain.parameters())
        assert ModelShape.from_path(tmp_path).vocab == VOCAB


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Llama4Config, r"model type 'llama4_text' \(Llama4ForCausalLM\) is not supported: the model's attention mask"),
        (Qwen3_5Config, r"model type 'qwen3_5_text' \(Qwen3_5ForCausalLM\) is not supported: decoder layer 0"),
        (
            CLIPConfig,
            r"model type 'clip' \(CLIPConfig\) is not supported: transformers has no causal language model of",
        ),
    ],
)
def test_others_are_refused_in_one_sentence_before_weights(
    config: type[PreTrainedConfig], reason: str, alone: None, tmp_path: Path
) -> None:
    whole = config()
    if config is not CLIPConfig:
        text = whole.get_text_config().model_type
        whole = config(text_config=_text(text))
    whole.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    for attempt in (
        lambda: megakv.init_inference(tmp_path),
        lambda: dry_run(tmp_path, {"dtype": "fp32"}, context=16),
    ):
        with pytest.raises(ValueError, match=reason) as caught:
            attempt()
        assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)
