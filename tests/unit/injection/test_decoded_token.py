"""A decoded token goes from `generate` to its kernel through few files, which the documentation names in order."""

import gc
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import megakv
from megakv.attention.layer import load_layer
from tests.unit.injection.compiled_layers import model_of

PACKAGE = Path(megakv.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
MOST = 25


class Between(LogitsProcessor):
    """Notes which files of the package are entered between two tokens' logits, in this thread."""

    def __init__(self) -> None:
        self.left, self.files = 5, dict[str, None]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            gc.collect()
            gc.disable()
            sys.setprofile(self.note)
        elif self.left == -1:
            sys.setprofile(None)
            gc.enable()
        return scores

    def note(self, frame: FrameType, event: str, _argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.files.setdefault(str(path.relative_to(PACKAGE)))


def named() -> list[str]:
    """The files that the page lists."""
    _, _, text = PAGE.read_text().partition("## A decoded token\n")
    return re.findall(r"^\d+\. `([\w/]+\.py)`", text.partition("\n## ")[0], re.MULTILINE)


def test_the_files_of_a_decoded_token_are_few_and_named_in_order(alone: None) -> None:
    if load_layer()[0] is None:
        pytest.skip(f"no compiled kernel: {load_layer()[1]}")
    between, ids = Between(), torch.randint(3, 100, (1, 60))
    with megakv.init_inference(model_of("llama"), {"dtype": "fp32"}) as engine:
        try:
            engine.generate(ids, max_new_tokens=9, do_sample=False, logits_processor=[between])
        finally:
            sys.setprofile(None)
            gc.enable()
    assert list(between.files) == named()
    assert len(between.files) <= MOST
