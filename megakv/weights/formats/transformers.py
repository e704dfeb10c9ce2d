"""Folders whose weights transformers' own quantizers load: modules stay what these make of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

from megakv.base.errors import CombinationError, MegaKVError
from megakv.weights.files import QUANTISED_TYPES, StoredTensors
from megakv.weights.formats.format import LoadRequest, WeightFormat
from megakv.weights.formats.quantizer_weights import QuantizerWeights
from megakv.weights.formats.unpacked import quantization_of
from megakv.weights.quantised import settle

logger = logging.getLogger(__name__)


class TransformersFormat(WeightFormat):
    """Quantised modules, each with weights and products of its own: context parallelism leaves them alone."""

    name = "transformers"

    def __init__(self, directory: Path | None = None):
        super().__init__(directory)
        self._method = ""
        self._quantizer: Any = None
        self._device = torch.device("cpu")

    @classmethod
    def recognises(cls, directory: Path, config: PreTrainedConfig) -> bool:
        return bool(quantization_of(config))

    @property
    def quantised(self) -> str | None:
        return self._method or "by transformers"

    def check(self, request: LoadRequest, config: PreTrainedConfig) -> None:
        values = quantization_of(config)
        self._method, self._device = values["quant_method"], request.device
        refuse_cuts(f"the checkpoint, quantised by {self._method}", request)
        self._quantizer = make_quantizer(values, request.device)
        if self.directory is not None:
            StoredTensors(self.directory, QUANTISED_TYPES)

    def replace(self, model: PreTrainedModel) -> None:
        assert self.directory is not None
        files = sorted({str(self.directory / name) for name in StoredTensors(self.directory).file_of.values()})
        for config in (model.config, model.config.get_text_config()):
            if getattr(config, "quantization_config", None) is not None:
                config.quantization_config = self._quantizer.quantization_config
        model.hf_quantizer = self._quantizer
        self._quantizer.preprocess_model(
            model, dtype=model.dtype, device_map={"": self._device}, checkpoint_files=files, use_kernels=False
        )

    def source(self, directory: Path, model: PreTrainedModel) -> QuantizerWeights:
        return QuantizerWeights(directory, model, self._quantizer, self._method, self._device)

    def finish(self, model: PreTrainedModel) -> None:
        self._quantizer.postprocess_model(model)
        settle(model, self._device)


def refuse_cuts(what: str, request: LoadRequest) -> None:
    """Refuse settings that would cut or move quantised weights, which stay as they are."""
    refused = {
        f"tensor_parallel.tp_size = {request.tp_size}": request.tp_size > 1,
        "megakv.offload.weights = true": request.offloaded,
    }
    for setting, given in refused.items():
        if given:
            raise CombinationError(
                "whole",
                f"{setting} is not supported for {what}, whose modules are not cut: leave it out, and share the work by "
                "megakv.context_parallel.size",
            )


def make_quantizer(values: Mapping[str, Any], device: torch.device) -> Any:
    """The quantizer of a quantization_config; what it lacks is named."""
    method = values["quant_method"]
    try:
        quantizer: Any = AutoHfQuantizer.from_config(dict(values), pre_quantized=True)
        quantizer.validate_environment(device_map={"": device}, weights_only=True)
    except ImportError as error:
        raise MegaKVError(f"quantization_config.quant_method = {method!r}: {_line(error)}") from error
    except Exception as error:  # each quantizer's own checks raise what they like
        known = "" if method in AUTO_QUANTIZER_MAPPING else f"; transformers knows {', '.join(AUTO_QUANTIZER_MAPPING)}"
        raise ValueError(
            f"config.json: quantization_config of {method!r} cannot be used on {device.type}: {_line(error)}{known}"
        ) from error
    if not quantizer.get_load_operations() and method in ("hqq",):
        raise ValueError(
            f"quantization_config.quant_method = {method!r}: transformers {transformers.__version__} loads no such "
            "checkpoint; load the module by its package, and give that to init_inference"
        )
    return quantizer


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
