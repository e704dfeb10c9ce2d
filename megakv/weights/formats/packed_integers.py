"""GPTQ and AWQ: a few bits for a number, a scale and a zero for a group of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megakv.weights.formats.exact_blocks import in_blocks
from megakv.weights.formats.unpacked import Parts, UnpackedFormat, indices, runs, whole_number
from megakv.weights.lazy import LazyTensor
from megakv.weights.placement.slices import Ranges

WORD = 32
"""Bits of the integers that numbers are packed in."""
GPTQ_FORMS = {"gptq": 1, "gptq_v2": 0}
"""What stored zeros lack of what they are."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""At which place of its word AWQ keeps each of eight numbers."""


def unpacked_words(words: Tensor, dim: int, bits: int, order: Sequence[int]) -> Tensor:
    """Numbers of some bits, `32 // bits` from each word along a dimension."""
    shifts = torch.tensor([bits * place for place in order], dtype=torch.int32)
    numbers = (words.movedim(dim, -1).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, dim)


class PackedIntegersFormat(UnpackedFormat):
    """Weights ``(number - zero) * scale``; numbers lie ``[in, out]``, packed along `packed`."""

    ends = {".qweight": ".weight", ".qzeros": ".weight", ".scales": ".weight", ".g_idx": ".weight"}
    scales = (".scales",)
    packed = 0
    order: tuple[int, ...] = ()

    def __init__(self, directory: Path | None = None):
        super().__init__(directory)
        self.bits, self.offset = 4, 0

    def unpack(self, name: str, parts: Parts) -> LazyTensor:
        words, zeros, scales, index = parts[".qweight"], parts[".qzeros"], parts[".scales"], parts.get(".g_idx")
        order = self.order or tuple(range(WORD // self.bits))
        each = len(order)
        sizes = [size * (each if dim == self.packed else 1) for dim, size in enumerate(words.shape)]
        if words.ndim != 2 or scales.ndim != 2 or not scales.shape[0]:
            raise ValueError("numbers and scales have two dimensions")
        inputs, outputs = sizes
        groups = scales.shape[0]
        if tuple(zeros.shape) != (groups, -(-outputs // each)) or scales.shape[1] != outputs or inputs % groups:
            raise ValueError(f"wanted are scales [groups, {outputs}] and zeros [groups, {outputs // each}]")
        if index is not None and tuple(index.shape) != (inputs,):
            raise ValueError(f"wanted is the group of each of {inputs} inputs")
        group_of = torch.arange(inputs) // (inputs // groups) if index is None else index.whole().long()
        if bool(((group_of < 0) | (group_of >= groups)).any()):
            raise ValueError(f"an input is of a group that does not exist, of {groups}")

        def numbers(dim: int, ranges: Ranges) -> Tensor:
            """Numbers of some inputs (0) or outputs (1)."""
            if dim != self.packed:
                return unpacked_words(words.read(dim, ranges), self.packed, self.bits, order)
            found = []
            for start, stop in ranges:
                first = start // each
                part = unpacked_words(words.read(dim, ((first, -(-stop // each)),)), dim, self.bits, order)
                found.append(part.narrow(dim, start - first * each, stop - start))
            return torch.cat(found, dim=dim)

        def read(dim: int, ranges: Ranges) -> Tensor:
            group = group_of[indices(runs(dim, ranges, 1, inputs))]
            zero = unpacked_words(zeros.whole(), 1, self.bits, order)[:, :outputs] + self.offset
            chosen = indices(runs(dim, ranges, 0, outputs))
            zero, scale = zero[:, chosen], scales.read(1, runs(dim, ranges, 0, outputs)).float()
            return ((numbers(1 - dim, ranges) - zero[group]).float() * scale[group]).t()

        weight = LazyTensor((outputs, inputs), read)
        middle = 1 << (self.bits - 1)
        ordered = torch.equal(group_of, torch.arange(inputs) // (inputs // groups))
        if not ordered or bool((unpacked_words(zeros.whole(), 1, self.bits, order) + self.offset != middle).any()):
            return weight
        return in_blocks(
            weight, lambda dim, ranges: (numbers(1 - dim, ranges) - middle).t(), lambda: scales.whole().t(), self.bits
        )


class GptqFormat(PackedIntegersFormat):
    """Numbers packed along inputs; an input may be of any group."""

    name = "gptq"
    method = "gptq"

    def configure(self, values: Mapping[str, Any]) -> None:
        self.bits = whole_number(values, "bits", (2, 4, 8), 4)
        form = values.get("checkpoint_format") or "gptq"
        if form not in GPTQ_FORMS:
            raise ValueError(
                f"config.json: quantization_config.checkpoint_format = {form!r} is not supported; allowed: "
                f"{' or '.join(map(repr, GPTQ_FORMS))}"
            )
        self.offset = GPTQ_FORMS[form]


class AwqFormat(PackedIntegersFormat):
    """Numbers packed along outputs, in an order of their own."""

    name = "awq"
    method = "awq"
    packed = 1
    order = AWQ_ORDER

    def configure(self, values: Mapping[str, Any]) -> None:
        whole_number(values, "bits", (4,), 4)
        version = str(values.get("version", "gemm")).lower()
        if version != "gemm":
            raise ValueError(
                f"config.json: quantization_config.version = {version!r} is not supported; allowed: 'gemm', in which "
                "AWQ models are published"
            )
