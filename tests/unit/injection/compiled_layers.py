"""Models whose layers are compiled calls, and what comes of them."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.families import FAMILIES


def model_of(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[name](**changes), dtype=torch.float32).eval()


def tokens(model: Any, ids: Tensor) -> list[int]:
    return model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
