"""Leaving out rows nobody reads changes no row that is read, and spares the work."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from megakv.injection.last_layer import LastLayerRows
from tests.families import FAMILIES

DENSE = ["llama", "llama_tied", "opt", "gpt_neox", "gemma2", "phi3", "cohere", "starcoder2", "glm4", "falcon", "gpt_j"]


def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits[0]


@pytest.mark.parametrize("name", DENSE)
def test_wanted_rows_are_those_of_the_whole_pass(name: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32).eval()
    ids = torch.randint(3, 100, (1, 29))
    whole = logits_of(model, ids)
    rows = torch.tensor([0, 7, 28])
    hooks = LastLayerRows(model)
    seen: list[int] = []
    layer = model.get_decoder().layers[-1] if hasattr(model.get_decoder(), "layers") else model.transformer.h[-1]
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    for linear in linears:
        linear.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[-2]))
    hooks.want(rows, 29)
    found = logits_of(model, ids)
    assert (found[rows] - whole[rows]).abs().max() <= 1e-5 * whole.abs().max()
    assert not torch.allclose(found, whole)
    assert seen.count(3) >= 2
    hooks.want(torch.arange(29), 29)
    assert torch.equal(logits_of(model, ids), whole)
    hooks.want(rows, 29)
    hooks.remove()
    assert torch.equal(logits_of(model, ids), whole)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_left_alone(name: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32).eval()
    ids = torch.randint(3, 100, (1, 29))
    whole = logits_of(model, ids)
    hooks = LastLayerRows(model)
    hooks.want(torch.tensor([28]), 29)
    assert torch.equal(logits_of(model, ids), whole)
