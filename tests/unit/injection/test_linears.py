"""Linears on passes of few rows: the same results, and everything is given back."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from megakv.injection import linears
from megakv.injection.linears import FewRowsLinears
from megakv.weights import products
from megakv.weights.products import Products
from tests.families import FAMILIES


@pytest.mark.parametrize("name", ["llama_tied", "gpt_neox", "mixtral", "phi3"])
def test_results_are_the_model_s_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32).eval()
    few, many = torch.randint(3, 100, (1, 5)), torch.randint(3, 100, (1, products.FEW_ROWS + 1))
    with torch.no_grad():
        whole = [model(ids).logits for ids in (few, many)]
        seen: list[tuple[int, ...]] = []

        def product(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, products: Products | None = None
        ) -> torch.Tensor:
            seen.append(tuple(weight.shape))
            return nn.functional.linear(x, weight, bias)

        monkeypatch.setattr(linears, "rows_product", product)
        monkeypatch.setattr(linears, "LEAST_WEIGHT", 0)
        installed = FewRowsLinears(model)
        assert torch.equal(model(few).logits, whole[0])
        assert len(seen) == len(installed.forwards)
        assert tuple(model.get_output_embeddings().weight.shape) in seen
        seen.clear()
        assert torch.equal(model(many).logits, whole[1])
        assert not seen
        installed.remove()
        assert torch.equal(model(few).logits, whole[0])
    assert not seen
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_was_replaced_before_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "LEAST_WEIGHT", 0)
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"](), dtype=torch.float32).eval()
    own = model.model.layers[0].mlp.down_proj
    own.forward = lambda x: x.new_zeros((*x.shape[:-1], own.out_features))
    replaced = own.forward
    installed = FewRowsLinears(model)
    assert own.forward is replaced
    installed.remove()
    assert own.forward is replaced


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (17,), (2, 33), (1, 71), (130,)])
def test_products_of_many_rows(dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Widened or padded, they are as near to exact ones as PyTorch's, whatever rows and blocks there are."""
    monkeypatch.setattr(products, "BLOCK", 1000)
    weight, bias = torch.randn(67, 101).to(dtype)[:, :97], torch.randn(67).to(dtype)
    x = torch.randn(*shape, 97).to(dtype)
    for given in (None, bias):
        exact = nn.functional.linear(x.double(), weight.double(), None if given is None else given.double())
        with torch.no_grad():
            theirs = (nn.functional.linear(x, weight, given).double() - exact).abs().max()
            for product in (products.widened_product, products.padded_product):
                found = product(x, weight, given)
                assert found.dtype == dtype and found.shape == exact.shape
                assert (found.double() - exact).abs().max() <= 1.05 * theirs + 1e-6


@pytest.mark.parametrize("pays", [False, True])
def test_a_model_s_many_rows(pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "LEAST_WEIGHT", 0)
    model = AutoModelForCausalLM.from_config(FAMILIES["gpt_neox"](), dtype=torch.float32).eval()
    ids = torch.randint(3, 100, (2, 77))
    with torch.no_grad():
        exact = model(ids).logits
        plain = (model.to(torch.bfloat16)(ids).logits - exact).abs().max()
        installed = FewRowsLinears(model, Products(many="float32" if pays else "PyTorch"))
        found = model(ids).logits
        installed.remove()
    assert (found - exact).abs().max() <= 1.5 * plain
