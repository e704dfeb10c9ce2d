"""Products on processors by every library, and what is measured of them."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from megakv.attention.linear import load_linear
from megakv.weights import products
from megakv.weights.products import Products


@pytest.mark.parametrize("library", [products.TORCH, products.ONEDNN, products.OWN])
def test_products_of_all_libraries(library: str) -> None:
    """Of odd sizes, of views of larger weights, with a bias and without."""
    settings = Products(many=library)
    for _ in range(40):
        *shape, outputs, columns = torch.randint(1, 200, (4,)).tolist()
        whole = torch.randn(outputs + 7, columns + 9)
        weights = whole[:outputs, :columns].clone(), whole[3 : outputs + 3, :columns], whole[:outputs, 5 : columns + 5]
        weight, x = weights[int(torch.randint(3, ()))], torch.randn(*shape[outputs % 2 :], columns + 3)[..., 2:-1]
        bias = torch.randn(outputs + 2)[1:-1] if outputs % 3 else None
        with torch.inference_mode(mode=bool(columns % 2)), torch.no_grad():
            found = products.rows_product(x, weight, bias, settings)
        expected = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    # What no library but PyTorch's is for.
    weight = nn.Parameter(torch.randn(3, 4))
    assert products.rows_product(torch.randn(99, 4), weight, None, settings).requires_grad
    assert products.rows_product(torch.randn(0, 4), weight, None, settings).shape == (0, 3)
    double = products.rows_product(torch.randn(99, 4).double(), weight.double(), None, settings)
    assert double.dtype == torch.float64


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every range of rows has a library, which has a rate; without oneDNN there are others."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = Products.measured(dtype)
        first, second, last = found.rates
        assert (first.first, second.first, last.first) == (17, 65, 257) and last.last is None
        assert last.library == (products.OWN if found.fuses else found.many)
        assert all(each.library in each.flops and products.TORCH in each.flops for each in found.rates)
        assert (products.ONEDNN in last.flops) == (dtype == torch.float32 and torch.backends.mkldnn.is_available())
        assert (products.OWN in last.flops) == (load_linear()[0] is not None)
    assert Products.measured(torch.float64).rates == ()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert all(products.ONEDNN not in each.flops for each in Products.measured(torch.float32).rates)


def test_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    names = products.OWN, products.TORCH, products.ONEDNN

    def measured(*rates: tuple[float, ...]) -> Products:
        given = iter(rates)
        monkeypatch.setattr(products, "_rates", lambda dtype, rows: dict(zip(names, next(given), strict=True)))
        return Products.measured(torch.float32)

    found = measured((9.0, 5.0, 8.0), (9.0, 5.0, 10.0), (8.9, 5.0, 10.0))
    assert (found.most_rows, found.many, found.fuses) == (256, products.ONEDNN, False)
    found = measured((9.0, 5.0, 8.0), (7.0, 5.0, 10.0), (9.1, 5.0, 10.0))
    assert (found.most_rows, found.many, found.fuses) == (64, products.OWN, True)
    found = measured((8.0, 5.0, 8.0), (7.0, 9.5, 10.0), (9.1, 9.5, 10.0))
    assert (found.most_rows, found.many, found.fuses) == (16, products.TORCH, True)
    assert [each.library for each in found.rates] == [products.OWN] * 3
    monkeypatch.setattr(products, "_rates", lambda dtype, rows: {products.TORCH: 1.0})
    found = Products.measured(torch.float32)
    assert (found.most_rows, found.many, found.fuses) == (16, products.TORCH, False)


@pytest.mark.parametrize("level", ["AVX2", "SSE41"])
def test_other_processors(level: str) -> None:
    """What oneDNN has there multiplies, or is left out, with the same results."""
    code = (
        "import torch; from megakv.weights.products import *; torch.set_grad_enabled(False)\n"
        "x, weight = torch.randn(77, 130), torch.randn(35, 130)\n"
        "for name in libraries(torch.float32):\n"
        "    found = rows_product(x, weight, None, Products(many=name))\n"
        "    assert (found - x @ weight.t()).abs().max() < 1e-3, name\n"
        "print(Products.measured(torch.bfloat16).many)"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": level, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_long_inputs_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit rows are widened some at a time, whichever library does it."""
    monkeypatch.setattr(products, "MOST_ROWS", 100)
    x, weight, bias = torch.randn(2, 157, 40).bfloat16(), torch.randn(33, 40).bfloat16(), torch.randn(33).bfloat16()
    expected = nn.functional.linear(x.double(), weight.double(), bias.double())
    for many in (products.OWN, products.WIDENED, products.TORCH):
        with torch.no_grad():
            found = products.many_product(x, weight, bias, Products(many=many))
        assert found.shape == expected.shape and found.dtype == x.dtype
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def test_one_row_for_all_outputs_is_pytorchs() -> None:
    x, weight = torch.randn(3, 8), torch.randn(1, 8).expand(6, 8)
    with torch.no_grad():
        assert torch.allclose(products.rows_product(x, weight), nn.functional.linear(x, weight), atol=1e-5)
