"""Models whose steps of decoding may be graphs, and what is asked of them: on any device."""

import random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.families import FAMILIES


def plain_model(name: str, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    config = FAMILIES[name]()
    if name in ("mistral", "gemma2", "gpt_oss"):
        # Head dims of the others are multiples of 8 as they are.
        config.head_dim = 16
    attention = "sdpa" if name == "falcon_alibi" else "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    return model.eval().to(device)


def prompts(rows: int, length: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Ragged ones, padded on the left."""
    ids, mask = torch.randint(3, 190, (rows, length)), torch.ones(rows, length, dtype=torch.int64)
    for row in range(1, rows):
        mask[row, : random.randint(0, length - 1)] = 0
    return ids.masked_fill(mask == 0, 0).to(device), mask.to(device)


def generate(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    defaults = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **{**defaults, **options})


def check_logits(model: Any, texts: list[list[int]], logits: Tensor) -> None:
    """That they are the plain model's behind each text."""
    for text, found in zip(texts, logits, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([text], device=found.device)).logits[0, -1]
        assert float((found - wanted).norm() / wanted.norm()) < 1e-4, text


def extend_caches(engine: Any, model: Any, turns: int = 60) -> None:
    """Joint passes of any caches, forks among them, between prompts: what each gives alone."""
    texts, caches = list[list[int]](), list[Any]()
    for turn in range(turns):
        if len(caches) < 2 or (turn % 5 == 0 and len(caches) < 12):
            text, cache = [random.randint(3, 190) for _ in range(random.randint(1, 70))], engine.new_cache()
            new = [text]
            if caches and turn % 2:
                source = random.randrange(len(caches))
                cache, text = caches[source].fork(), [*texts[source], *text]
            caches.append(cache)
            texts.append(text)
            some = [len(caches) - 1]
        else:
            some = random.sample(range(len(caches)), random.randint(1, len(caches)))
            new = [[random.randint(3, 190)] for _ in some]
            for index, own in zip(some, new, strict=True):
                texts[index] = texts[index] + own
        check_logits(model, [texts[index] for index in some], engine.extend([caches[index] for index in some], new))
