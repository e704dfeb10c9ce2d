"""GGUF's blocks against the gguf package: what is unpacked, bit for bit, and what is packed."""

import numpy as np
import pytest
import torch

from megakv.weights.blocks import BLOCKS, pack, unpack
from tests.packed import drawn_packed

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", BLOCKS)
def test_unpacked_bits(kind: str) -> None:
    """Of random bytes all levels and scales, finite ones."""
    block, number = BLOCKS[kind], gguf.GGMLQuantizationType[kind]
    assert (block.elements, block.bytes) == gguf.GGML_QUANT_SIZES[number] and block.number == number
    for _ in range(20):
        rows, count = torch.randint(1, 9, (2,)).tolist()
        packed = drawn_packed(rows, count * block.elements, kind)
        found = unpack(packed, kind)
        expected = gguf.quants.dequantize(packed.numpy(), number)
        assert found.shape == (rows, count * block.elements)
        assert np.array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))
    assert unpack(packed[:0], kind).shape == (0, count * block.elements)
    assert torch.equal(unpack(torch.cat((packed, packed), dim=1)[:, : packed.shape[1]], kind), found)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_bytes(kind: str, dtype: torch.dtype) -> None:
    for size in (1e-3, 1.0, 100.0):
        weight = (torch.randn(7, 160) * size).to(dtype)
        weight[2] = 0
        weight[3, :64] = weight[3, 0]
        # Ties.
        weight[4] = torch.arange(160) / 2
        found = pack(weight, kind)
        expected = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind])
        assert np.array_equal(found.numpy(), expected)
        error = (unpack(found, kind) - weight.float()).abs()
        assert float(error.max()) <= float(weight.float().abs().max()) / (100 if kind == "Q8_0" else 10)


def test_rows_that_are_no_whole_blocks() -> None:
    with pytest.raises(ValueError, match="100 weights are no whole blocks of Q8_0, 32 weights each"):
        pack(torch.randn(2, 100), "Q8_0")
    with pytest.raises(ValueError, match="40 bytes in torch.uint8 are no whole blocks of Q8_0, 34 bytes"):
        unpack(torch.zeros(2, 40, dtype=torch.uint8), "Q8_0")
