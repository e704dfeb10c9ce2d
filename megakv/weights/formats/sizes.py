"""Bits that weights take by format, for whoever asks what fits before there are any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megakv.weights.blocks import BLOCKS
from megakv.weights.gguf import gguf_of
from megakv.weights.gguf_file import GgufFile

LAYER = "blk."
"""How GGUF's names of tensors in decoder layers begin."""


@dataclass(frozen=True)
class PackedBits:
    """Bits of a weight in decoder layers, and of one in embeddings and the output head."""

    name: str
    layers: float
    outside: float


def _bits(kind: str) -> float:
    return 8 * BLOCKS[kind].bytes / BLOCKS[kind].elements


def _mixed(kind: str) -> tuple[float, float]:
    """Llama.cpp's mixtures "M": a seventh of the layers' weights, and the output head, are in Q6_K."""
    return (6 * _bits(kind) + _bits("Q6_K")) / 7, (_bits(kind) + _bits("Q6_K")) / 2


KNOWN = {
    "int8": PackedBits("int8", _bits("Q8_0"), _bits("Q8_0")),
    "q4_1": PackedBits("q4_1", _bits("Q4_1"), _bits("Q8_0")),
    **{kind: PackedBits(kind, _bits(kind), _bits(kind)) for kind in BLOCKS},
    **{f"{kind}_M": PackedBits(f"{kind}_M", *_mixed(kind)) for kind in ("Q4_K", "Q5_K")},
}
"""Formats that weights can be given at load, and those of GGUF files, by their usual names."""


def bits_in(directory: Path, itemsize: int) -> PackedBits | None:
    """Those of a GGUF file's weights; what is unpacked takes `itemsize` bytes. None for other folders."""
    if (source := gguf_of(directory)) is None:
        return None
    nbytes, count = [0, 0], [0, 0]
    for tensor in GgufFile(source).tensors.values():
        outside = not tensor.name.startswith(LAYER)
        elements = tensor.rows * tensor.shape[-1]
        packed = tensor.kind in BLOCKS and len(tensor.shape) > 1
        nbytes[outside] += tensor.nbytes if packed else elements * itemsize
        count[outside] += elements
    layers, outer = (8 * size / max(number, 1) for size, number in zip(nbytes, count, strict=True))
    return PackedBits("gguf", layers, outer)
