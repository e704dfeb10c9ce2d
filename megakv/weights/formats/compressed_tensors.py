"""Folders of compressed-tensors (llm-compressor) whose activations are not quantised: w4a16, w8a16 and their kin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from megakv.base.errors import require_extra
from megakv.weights.formats.exact_blocks import in_blocks
from megakv.weights.formats.format import quantization_of
from megakv.weights.formats.unpacked import Parts, UnpackedFormat
from megakv.weights.lazy import LazyTensor
from megakv.weights.placement.slices import Ranges, SliceSpec

PARTS = ("packed", "scale", "zero_point", "shape", "g_idx", "global_scale")
SCALE = ".weight_scale"


class CompressedTensorsFormat(UnpackedFormat):
    """Weights in any of the package's forms, which it unpacks itself."""

    name = "compressed_tensors"
    method = "compressed-tensors"
    ends = {f".weight_{part}": ".weight" for part in PARTS}
    scales = (SCALE, ".weight_global_scale")

    def __init__(self, directory: Path | None = None):
        super().__init__(directory)
        self._config: Any = None

    @classmethod
    def recognises(cls, directory: Path, config: PreTrainedConfig) -> bool:
        return super().recognises(directory, config) and not quantises_activations(quantization_of(config))

    def configure(self, values: Mapping[str, Any]) -> None:
        require_extra("quantised", f"a checkpoint of {self.method}")
        from compressed_tensors.quantization import QuantizationConfig

        known = {key: values[key] for key in ("config_groups", "ignore", "format") if key in values}
        try:
            self._config = QuantizationConfig.model_validate({**known, "quantization_status": "compressed"})
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"config.json: quantization_config is not one of compressed-tensors: {reason}") from error

    def unpack(self, name: str, parts: Parts) -> LazyTensor:
        from compressed_tensors.compressors import BaseCompressor

        scheme = self._scheme(name.removesuffix(".weight"))
        form = str(getattr(kind := scheme.format or self._config.format, "value", kind))
        compressor: Any = BaseCompressor.get_value_from_registry(form)
        # What is packed says what it was.
        shape = [int(size) for size in parts[".weight_shape"].whole()] if ".weight_packed" in parts else None
        if SCALE not in parts or (shape is not None and len(shape) != 2):
            raise ValueError("its scales or its shape are missing")
        if shape is not None:
            self._check_packed(parts, shape, scheme.weights.num_bits)

        def read(dim: int, ranges: Ranges) -> Tensor:
            stored = {end.removeprefix(".") or "weight": part.whole() for end, part in parts.items()}
            unpacked: Tensor = compressor.decompress(stored, scheme)["weight"]
            return SliceSpec(dim, ranges).take(unpacked)

        weight = LazyTensor(shape or parts[""].shape, read)
        symmetric = scheme.weights.symmetric and scheme.weights.strategy in ("group", "channel", "tensor")
        if shape is None or form != "pack-quantized" or not symmetric or ".weight_g_idx" in parts:
            return weight
        return self._in_blocks(weight, parts, scheme.weights.num_bits)

    def _in_blocks(self, weight: LazyTensor, parts: Parts, bits: int) -> LazyTensor:
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        def levels(dim: int, ranges: Ranges) -> Tensor:
            found: Tensor = unpack_from_int32(parts[".weight_packed"].whole(), bits, weight.shape)
            return SliceSpec(dim, ranges).take(found)

        def scales() -> Tensor:
            found = parts[SCALE].whole()
            return found.reshape(-1, found.shape[-1] if found.ndim > 1 else 1).expand(weight.shape[0], -1)

        return in_blocks(weight, levels, scales, bits)

    def _check_packed(self, parts: Parts, shape: list[int], bits: int) -> None:
        packed, scale = parts[".weight_packed"].shape, parts[SCALE].shape
        wanted = (shape[0], -(-shape[1] * bits // 32))
        if tuple(packed) not in (wanted, (shape[0], shape[1] // 2)) or scale[0] not in (1, shape[0]):
            raise ValueError(f"{bits} bits of {shape} would be packed as {list(wanted)}")

    def _scheme(self, module: str) -> Any:
        """How a module's weight is quantised: as the group says that names it, else the one of its class."""
        groups = self._config.config_groups.values()
        for group in groups:
            for target in group.targets:
                if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                    return group
        found = [group for group in groups if any(not target.startswith("re:") for target in group.targets)]
        if not found:
            raise ValueError("no group of quantization_config.config_groups is for it")
        return found[0]


def quantises_activations(values: Mapping[str, Any]) -> bool:
    """Whether a quantization_config rounds what goes into or comes out of a linear, or keys and values."""
    groups = values.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    inside = any(
        isinstance(group, dict) and (group.get("input_activations") or group.get("output_activations"))
        for group in groups
    )
    return bool(inside or values.get("kv_cache_scheme") or values.get("transform_config"))
