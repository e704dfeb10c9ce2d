"""MXFP4 experts, the form in which GPT-OSS is published: four bits for a number, an exponent for 32 of them."""

from __future__ import annotations

import torch
from torch import Tensor

from megakv.weights.formats.fp8_blocks import EXPONENT_BIAS
from megakv.weights.formats.unpacked import Parts, UnpackedFormat, runs
from megakv.weights.lazy import LazyTensor
from megakv.weights.placement.slices import Ranges

BLOCKS, SCALES = "_blocks", "_scales"
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What four bits stand for (OCP Microscaling Formats, E2M1)."""
GROUP = 32
"""Numbers with one exponent."""


class Mxfp4Format(UnpackedFormat):
    """Experts ``[E, out, in / 32, 16]`` in bytes of two numbers, seen as the model's weight ``[E, in, out]``."""

    name = "mxfp4"
    method = "mxfp4"
    ends = {BLOCKS: "", SCALES: ""}
    scales = ()

    def unpack(self, name: str, parts: Parts) -> LazyTensor:
        blocks, scales = parts[BLOCKS], parts[SCALES]
        if blocks.ndim != 4 or blocks.shape[3] != GROUP // 2 or scales.shape != blocks.shape[:3]:
            raise ValueError(f"wanted are [experts, out, in / {GROUP}, {GROUP // 2}] and a scale for each of the first")
        experts, outputs, groups, _ = blocks.shape
        inputs = groups * GROUP

        def read(dim: int, ranges: Ranges) -> Tensor:
            if dim != 1:
                stored = {0: 0, 2: 1}[dim]
                return _unpacked(blocks.read(stored, ranges), scales.read(stored, ranges)).mT
            parts = []
            for start, stop in runs(dim, ranges, 1, inputs):
                first, last = start // GROUP, -(-stop // GROUP)
                whole = _unpacked(blocks.read(2, ((first, last),)), scales.read(2, ((first, last),)))
                parts.append(whole[..., start - first * GROUP : stop - first * GROUP].mT)
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

        return LazyTensor((experts, inputs, outputs), read)


def _unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Bytes ``[E, out, G, 16]`` and exponents ``[E, out, G]`` as numbers ``[E, out, 32 G]``."""
    pairs = torch.tensor([(NUMBERS[byte & 15], NUMBERS[byte >> 4]) for byte in range(256)])
    out = torch.empty(*blocks.shape[:3], GROUP, dtype=torch.float32)
    for bytes_of, exponents, result in zip(blocks, scales, out, strict=True):
        found = pairs[bytes_of.int()].flatten(-2)
        torch.ldexp(found, exponents.int().unsqueeze(-1) - EXPONENT_BIAS, out=result)
    return out.flatten(2)
