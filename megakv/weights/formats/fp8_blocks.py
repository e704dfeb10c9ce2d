"""FP8 with a scale for each square of a weight, as DeepSeek and Qwen publish their models; MXFP8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from megakv.weights.formats.format import quantization_of
from megakv.weights.formats.unpacked import Parts, UnpackedFormat, in_chunks, indices, runs
from megakv.weights.lazy import LazyTensor
from megakv.weights.placement.slices import Ranges

SCALES = "_scale_inv"
EXPONENT_BIAS = 127
"""Scales that are stored as bytes are powers of two."""


class Fp8BlocksFormat(UnpackedFormat):
    """Values times the scale of their square: the numbers that transformers unpacks them to."""

    name = "fp8_blocks"
    method = "fp8"
    ends = {SCALES: "", ".activation_scale": ".weight"}
    scales = (SCALES,)

    def __init__(self, directory: Path | None = None):
        super().__init__(directory)
        self._block: tuple[int, int] | None = None

    @classmethod
    def recognises(cls, directory: Path, config: PreTrainedConfig) -> bool:
        return quantization_of(config).get("quant_method") in (cls.method, "mxfp8")

    def configure(self, values: Mapping[str, Any]) -> None:
        block = values.get("weight_block_size")
        if block is None:
            return
        sizes = block if isinstance(block, list | tuple) else []
        if len(sizes) != 2 or not all(isinstance(size, int) and 0 < size for size in sizes):
            raise ValueError(
                f"config.json: quantization_config.weight_block_size = {block!r} is not supported; allowed: two sizes, "
                "such as [128, 128], or none for one scale of a whole weight"
            )
        self._block = (sizes[0], sizes[1])

    def unpack(self, name: str, parts: Parts) -> LazyTensor:
        values = parts[""]
        if SCALES not in parts:
            return values
        scales = parts[SCALES]
        *several, rows, columns = values.shape
        grid = tuple(scales.shape) if scales.ndim > 1 else (*scales.shape, 1, 1)[-2:]
        block = self._block
        if block is None or grid[-2:] != (-(-rows // block[0]), -(-columns // block[1])):
            block = _divided((rows, columns), grid[-2:])
        if list(grid[:-2]) not in (several, []):
            raise ValueError("there are scales of another number of experts")
        height, width = block

        def read(dim: int, ranges: Ranges) -> Tensor:
            part, scale = values.read(dim, ranges), decoded(scales.whole()).reshape(grid)
            last = values.ndim
            if dim < last - 2 and scale.ndim > 2:
                scale = scale[indices(ranges)]
            row = indices(runs(dim, ranges, last - 2, rows)) // height
            column = indices(runs(dim, ranges, last - 1, columns)) // width
            out = torch.empty(part.shape, dtype=torch.float32)
            each = part.view(-1, *part.shape[-2:])
            by_column = scale[..., column].view(-1, grid[-2], len(column)).expand(len(each), -1, -1)
            for one, by, result in zip(each, by_column, out.view(each.shape), strict=True):
                for chunk in in_chunks(*one.shape):
                    torch.mul(one[chunk].float(), by[row[chunk]], out=result[chunk])
            return out

        return LazyTensor(values.shape, read)


def decoded(scales: Tensor) -> Tensor:
    """Scales as numbers: bytes are exponents."""
    return (scales.float() - EXPONENT_BIAS).exp2() if scales.dtype == torch.uint8 else scales.float()


def _divided(shape: tuple[int, int], grid: tuple[int, ...]) -> tuple[int, int]:
    """The size of squares of which there are as many as scales."""
    if not all(grid) or any(size % count for size, count in zip(shape, grid, strict=True)):
        raise ValueError("there are not as many scales as squares")
    return shape[0] // grid[0], shape[1] // grid[1]
