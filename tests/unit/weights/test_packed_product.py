"""Products with packed weights against float64 products of what they unpack to."""

import pytest
import torch

from megakv.weights.blocks import BLOCKS, unpack
from megakv.weights.packed_product import packed_product
from megakv.weights.products import OWN, TORCH, Products, multiplies_pairs
from tests.packed import drawn_packed


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def view(rows: int, columns: int, kind: str):
    """A weight of its own, or some rows, or some blocks of all rows, of a larger one."""
    block = BLOCKS[kind]
    whole, size = drawn_packed(rows + 5, columns + 2 * block.elements, kind), block.row_bytes(columns)
    views = whole[:rows, :size].clone(), whole[3 : rows + 3, :size], whole[:rows, block.bytes : size + block.bytes]
    return views[int(torch.randint(3, ()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("many", [TORCH, OWN])
@pytest.mark.parametrize("kind", BLOCKS)
def test_products(kind: str, many: str, dtype: torch.dtype) -> None:
    for most_rows in (8, 8, 20, 150, 300):
        rows, outputs, count = (int(torch.randint(1, most, ())) for most in (most_rows, 90, 9))
        columns = count * BLOCKS[kind].elements
        packed = view(outputs, columns, kind)
        x = torch.randn(*([2] * (rows % 2)), rows, columns).to(dtype)
        bias = torch.randn(outputs).to(dtype) if outputs % 2 else None
        found = packed_product(
            x, packed, kind, columns, bias, Products(most_rows=16, pairs=multiplies_pairs(dtype), many=many)
        )
        assert (found.dtype, found.shape) == (dtype, (*x.shape[:-1], outputs))
        weight = unpack(packed, kind).double()
        expected = x.double() @ weight.t() + (0 if bias is None else bias.double())
        size = x.double().abs() @ weight.abs().t() + (0 if bias is None else bias.double().abs()) + 1e-6
        assert (
            float(((found.double() - expected).abs() / size).max())
            <= (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
        )


def test_what_does_not_fit() -> None:
    packed = drawn_packed(3, 64, "Q4_1")
    with pytest.raises(ValueError, match="inputs of 32 columns do not fit rows of 40 bytes of Q4_1"):
        packed_product(torch.randn(1, 32), packed, "Q4_1", 32)
