"""Tiny models of images and text: their configurations, as they are published around each kind of text model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
from transformers.models.llama4.configuration_llama4 import Llama4Config
from transformers.models.llava.configuration_llava import LlavaConfig
from transformers.models.mistral3.configuration_mistral3 import Mistral3Config
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

from tests.tiny_configs import VOCAB, tiny_config

IMAGE = VOCAB - 1
CHUNK = 96
"""Tokens up to which Llama 4 is served: its first chunk."""
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN_SIZES = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
    "max_position_embeddings initializer_range pad_token_id bos_token_id eos_token_id"
).split()
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}


def text_values(model_type: str) -> dict[str, Any]:
    return tiny_config(model_type).to_dict()


def llava() -> PreTrainedConfig:
    vision = {**VISION, "model_type": "clip_vision_model", "projection_dim": 32}
    return LlavaConfig(text_config=text_values("llama"), vision_config=vision, image_token_index=IMAGE)


def mistral3() -> PreTrainedConfig:
    vision = {**VISION, "model_type": "pixtral", "head_dim": 16}
    return Mistral3Config(text_config=text_values("mistral"), vision_config=vision, image_token_index=IMAGE)


def gemma3() -> PreTrainedConfig:
    vision = {**VISION, "model_type": "siglip_vision_model"}
    ids = {"image_token_index": IMAGE, "image_token_id": IMAGE, "boi_token_index": 97, "eoi_token_index": 96}
    return Gemma3Config(text_config=text_values("gemma3_text"), vision_config=vision, mm_tokens_per_image=4, **ids)


def _qwen_text(model_type: str) -> dict[str, Any]:
    sizes = {name: value for name, value in text_values(model_type).items() if name in QWEN_SIZES}
    return {**sizes, "rope_parameters": QWEN_ROPE}


def qwen2_5_vl() -> PreTrainedConfig:
    vision = {**QWEN_VISION, "fullatt_block_indexes": [0]}
    return Qwen2_5_VLConfig(text_config=_qwen_text("qwen2"), vision_config=vision, **QWEN_IDS)


def qwen3_vl() -> PreTrainedConfig:
    vision = {**QWEN_VISION, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config=_qwen_text("qwen3"), vision_config=vision, **QWEN_IDS)


def qwen3_5() -> PreTrainedConfig:
    """Layers that are all attention; those published have three of four without."""
    text = text_values("qwen3_5_text")
    text["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
    return Qwen3_5Config(text_config=text, vision_config=QWEN_VISION, **QWEN_IDS)


def llama4() -> PreTrainedConfig:
    sizes = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5}
    text = text_values("llama4_text") | {"attention_chunk_size": CHUNK, "floor_scale": 2 * CHUNK}
    vision = {**VISION, **sizes, "model_type": "llama4_vision_model"}
    return Llama4Config(text_config=text, vision_config=vision, image_token_index=IMAGE)


WRAPPERS = {make.__name__: make for make in (llava, mistral3, gemma3, qwen2_5_vl, qwen3_vl, qwen3_5, llama4)}


def saved(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """A random model, also written to a folder."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model
