"""Adapters as peft makes them, and what it makes of them and their base models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": PROJECTIONS, "r": 3, "lora_alpha": 5},
    "rslora": {"target_modules": ["q_proj", "down_proj"], "r": 4, "use_rslora": True},
    "dora": {"target_modules": PROJECTIONS, "r": 2, "use_dora": True},
    "patterns": {
        "target_modules": PROJECTIONS,
        "r": 2,
        "rank_pattern": {"layers.1.self_attn.q_proj": 5, "down_proj": 1},
        "alpha_pattern": {r".*\.0\.mlp\..*_proj": 3},
    },
    "embeddings": {"target_modules": ["embed_tokens", "lm_head"], "r": 4},
    "saved": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
}


def save_base(config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def save_adapter(base: Path, folder: Path, load: Any = AutoModelForCausalLM, **settings: Any) -> None:
    """A random adapter of a base model, as peft writes it."""
    model = get_peft_model(load.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name or (settings.get("bias") and name.endswith("bias")):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def merged(base: Path, adapter: Path, dtype: torch.dtype, load: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """What peft makes of the two."""
    model = PeftModel.from_pretrained(load.from_pretrained(base, dtype=dtype), adapter)
    return model.merge_and_unload().eval()
