"""A checkpoint of quantised weights, each put together by transformers' quantizer when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightTransform

from megakv.base.errors import MegaKVError
from megakv.weights.checkpoint import CheckpointWeights
from megakv.weights.files import QUANTISED_TYPES, StoredTensors
from megakv.weights.formats.unpacked import check_finite
from megakv.weights.lazy import LazyTensor
from megakv.weights.placement.slices import SliceSpec

SCALES = ("scale", "absmax", "SCB")
"""Words in the last part of a key whose tensor scales others."""


class QuantizerWeights(CheckpointWeights):
    """Weights of a model whose modules a quantizer has replaced; each is whole, and given away when it is read."""

    owned = True

    def __init__(self, directory: Path, model: PreTrainedModel, quantizer: Any, method: str, device: torch.device):
        self._quantizer, self._model, self._device = quantizer, model, device
        self._later: dict[str, WeightConverter] = {}
        stored = StoredTensors(directory, QUANTISED_TYPES)
        super().__init__(directory, model, stored)
        packed = [key for key in stored.file_of if any(word in key.rpartition(".")[2] for word in SCALES)]
        if not self._later and not packed:
            raise MegaKVError(
                f"{directory / 'config.json'} says that weights are quantised ({method}), but they are stored plain "
                f"({next(iter(stored.file_of), 'nothing')} first): remove quantization_config from it, or fetch the "
                "checkpoint again"
            )
        for key in packed:
            check_finite(key, stored.open(key).whole(), directory)

    def has(self, name: str) -> bool:
        return name in self._later or super().has(name)

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        """A parameter in memory of its own, of whatever class the quantizer gives it."""
        if name not in self._later:
            return super().read(name, spec).clone()
        converter = self._later[name]
        for tensors in converter.collected_tensors.values():
            tensors[:] = [part.whole().clone().to(self._device) for part in tensors]
        found: Tensor = super()._convert(name, converter, self._model)[name]
        del self._later[name]
        return found

    def _rules(self, model: PreTrainedModel) -> list[WeightTransform]:
        return get_model_conversion_mapping(model, None, self._quantizer)

    def _convert(self, first: str, converter: WeightConverter, model: PreTrainedModel) -> dict[str, Any]:
        """What a quantizer makes waits until it is wanted; what it would leave alone is a plain weight."""
        collected: dict[str, list[LazyTensor]] = converter.collected_tensors
        if not any(hasattr(operation, "hf_quantizer") for operation in converter.operations):
            return super()._convert(first, converter, model)
        if set(collected) == {"weight"}:
            return {first: collected["weight"][0]}
        self._later[first] = converter
        return {}
