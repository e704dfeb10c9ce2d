"""Weights of a floating-point type, multiplied as they are."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from megakv.weights.formats.format import WeightFormat
from megakv.weights.gguf import gguf_of


class PlainFormat(WeightFormat):
    """What most folders of safetensors hold."""

    name = "plain"

    @classmethod
    def recognises(cls, directory: Path, config: PreTrainedConfig) -> bool:
        return gguf_of(directory) is None
