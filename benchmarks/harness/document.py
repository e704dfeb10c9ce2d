"""SmolLM2-135M-Instruct, or another model that is named, and prompts for it out of its recipe's document."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from transformers import AutoTokenizer

from .links import ROOT

DOCUMENT = ROOT / "recipes" / "smollm2" / "document.md"
PASSAGE = 200  # Tokens of a passage at most


def model_folder(given: str) -> tuple[Path, int]:
    """The folder of the model, made where none is named, and its positions."""
    if not given:
        sys.path.append(str(ROOT))
        from recipes.smollm2.weights import FOLDER, prepare_unpacked

        given = prepare_unpacked(FOLDER, None)
    config = Path(given) / "config.json"
    if not config.is_file():
        raise ValueError(f"--model {given}: there is no config.json: name a folder that holds a model")
    return Path(given).resolve(), json.loads(config.read_text())["max_position_embeddings"]


def prompts(model: Path, length: int) -> Iterator[list[int]]:
    """Prompts of a length, each from another place of the document on, so that nothing of one serves the next."""
    ids: list[int] = AutoTokenizer.from_pretrained(model)(DOCUMENT.read_text())["input_ids"]
    for start in range(0, len(ids), 97):
        yield [ids[(start + place) % len(ids)] for place in range(length)]


class Passages:
    """Prompts of any length, of which no two begin alike unless they are to: passages in an order that is drawn."""

    def __init__(self, model: str, seed: int):
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
