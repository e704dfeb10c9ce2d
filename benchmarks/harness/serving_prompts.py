"""The model that is served, and prompts for it: passages of a text, in an order that is drawn."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from .links import ROOT

DOCUMENT = ROOT / "recipes" / "smollm2" / "document.md"
PASSAGE = 200
"""Tokens of a passage at most."""


def prepared_model(arguments: argparse.Namespace) -> Path:
    """The folder of the model, made where none is named; a ValueError if prompts do not fit into its positions."""
    model = arguments.model
    if not model:
        sys.path.append(str(ROOT))
        from recipes.smollm2.weights import FOLDER, prepare

        model = prepare(FOLDER, None)
    config = Path(model) / "config.json"
    if not config.is_file():
        raise ValueError(f"--model {model}: there is no config.json: name a folder that holds a model")
    most = json.loads(config.read_text())["max_position_embeddings"] - 256
    for name in ("prompt", "longest"):
        if getattr(arguments, name) > most:
            raise ValueError(
                f"--{name} {getattr(arguments, name)}: the model's positions leave {most} for it beside the answer"
            )
    return Path(model).resolve()


class Passages:
    """Prompts of any length, of which no two begin alike unless they are to."""

    def __init__(self, model: str, seed: int):
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._ids: list[int] = self.tokenizer(DOCUMENT.read_text(), add_special_tokens=False)["input_ids"]
        self.random = Random(seed)

    def prompt(self, length: int) -> list[int]:
        """So many tokens."""
        found: list[int] = []
        while len(found) < length:
            start = self.random.randrange(len(self._ids))
            found += self._ids[start : start + self.random.randint(1, PASSAGE)]
        return found[:length]

    def log_uniform(self, longest: int) -> int:
        """A length from 1 on, of which each power of two is as likely as any other."""
        return min(longest, int((longest + 1) ** self.random.random()))

    def pieces(self, tokens: list[int]) -> list[str]:
        """Every token as text by itself, as the server writes them beside log probabilities."""
        return [self.tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in tokens]
