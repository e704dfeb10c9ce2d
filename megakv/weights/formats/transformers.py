"""Folders whose weights transformers' own quantizers load: modules stay what these make of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.base.errors import MegaKVError
from megakv.weights.files import QUANTISED_TYPES, StoredTensors
from megakv.weights.formats.format import LoadRequest, WeightFormat, quantization_of
from megakv.weights.formats.quantizer_weights import QuantizerWeights
from megakv.weights.formats.unpacked import forget_quantization
from megakv.weights.placement.slices import SliceSpec
from megakv.weights.quantised import refuse_changes, settle

WHAT = "a checkpoint that is quantised by {}, whose modules are not cut"
NOT_LOADED = ("hqq",)
"""Methods whose quantizers quantise at load, but have no way to read what was saved."""


class TransformersFormat(WeightFormat):
    """Quantised modules, each with weights and products of its own: context parallelism leaves them alone."""

    name = "transformers"

    def __init__(self, directory: Path | None = None):
        super().__init__(directory)
        self._method = "transformers"
        self._quantizer: Any = None
        self._device = torch.device("cpu")

    @classmethod
    def recognises(cls, directory: Path, config: PreTrainedConfig) -> bool:
        return bool(quantization_of(config))

    @property
    def quantised(self) -> str | None:
        return self._method

    def check(self, request: LoadRequest, config: PreTrainedConfig) -> None:
        values = quantization_of(config)
        self._method, self._device = values["quant_method"], request.device
        self._quantizer = make_quantizer(values, request.device)
        refuse_changes(WHAT.format(self._method), request)
        if self._method == "compressed-tensors":
            self.notes.append(f"{self.directory}: weights are unpacked at the start, and take the memory of plain ones")
        if values.get("load_in_8bit") and values.get("llm_int8_threshold", 6.0):
            self.notes.append(
                f"{self.directory}: bitsandbytes looks for outliers (llm_int8_threshold) among the tokens that are "
                "computed together: where ranks share a prompt, or it is read in chunks, tokens may be others"
            )
        if self.directory is not None:
            StoredTensors(self.directory, QUANTISED_TYPES)

    def replace(self, model: PreTrainedModel) -> None:
        if self._quantizer is None:
            # A plan, over shapes alone: as of plain weights, which take no less.
            self._method = quantization_of(model.config).get("quant_method", self._method)
            return forget_quantization(model)
        assert self.directory is not None
        files = sorted({str(self.directory / name) for name in StoredTensors(self.directory).file_of.values()})
        for config in (model.config, model.config.get_text_config()):
            if getattr(config, "quantization_config", None) is not None:
                config.quantization_config = self._quantizer.quantization_config
        model.hf_quantizer = self._quantizer
        self._quantizer.preprocess_model(
            model, dtype=model.dtype, device_map={"": self._device}, checkpoint_files=files, use_kernels=False
        )

    def check_cut(self, placement: Mapping[str, SliceSpec], tp_size: int) -> None:
        refuse_changes(WHAT.format(self._method), LoadRequest(self._device, None, tp_size))

    def source(self, directory: Path, model: PreTrainedModel) -> QuantizerWeights:
        return QuantizerWeights(directory, model, self._quantizer, self._method, self._device)

    def finish(self, model: PreTrainedModel) -> None:
        self._quantizer.postprocess_model(model)
        settle(model, self._device)


def make_quantizer(values: Mapping[str, Any], device: torch.device) -> Any:
    """The quantizer of a quantization_config; what it lacks is named."""
    # It imports the packages of all quantizers.
    from transformers.quantizers.auto import AutoHfQuantizer

    method = values["quant_method"]
    if method in NOT_LOADED:
        raise ValueError(
            f"quantization_config.quant_method = {method!r}: transformers loads no such "
            "checkpoint; load the module by that package, and give it to megakv.init_inference"
        )
    try:
        quantizer: Any = AutoHfQuantizer.from_config(dict(values), pre_quantized=True)
        quantizer.validate_environment(device_map={"": device}, weights_only=True)
    except ImportError as error:
        raise MegaKVError(f"quantization_config.quant_method = {method!r}: {_line(error)}") from error
    except Exception as error:  # each quantizer's own checks raise what they like
        raise ValueError(
            f"config.json: quantization_config of {method!r} cannot be used on {device.type}: {_line(error)}"
        ) from error
    return quantizer


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
