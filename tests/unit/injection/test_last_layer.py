"""Leaving out rows nobody reads changes no row that is read, and spares the work."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from megakv.forward.last_layer import LastLayerRows
from megakv.forward.pass_plan import LastRows
from tests.families import FAMILIES

DENSE = ["llama", "llama_tied", "opt", "gpt_neox", "gemma2", "phi3", "cohere", "starcoder2", "glm4", "falcon", "gpt_j"]


def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits[0]


def last_layer(model: torch.nn.Module) -> torch.nn.Module:
    decoder = model.get_decoder()
    return decoder.layers[-1] if hasattr(decoder, "layers") else model.transformer.h[-1]


@pytest.mark.parametrize("queries", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_wanted_rows_are_those_of_the_whole_pass(name: str, queries: bool) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32).eval()
    ids = torch.randint(3, 100, (1, 29))
    whole = logits_of(model, ids)
    rows = torch.tensor([0, 7, 28])
    wanted: list[LastRows] = []
    hooks = LastLayerRows(model, lambda: wanted[-1] if wanted else None)
    assert hooks.attention == model.config.num_hidden_layers - 1
    seen: dict[str, int] = {}
    for path, linear in last_layer(model).named_modules():
        if isinstance(linear, torch.nn.Linear):
            linear.register_forward_hook(lambda _, inputs, output, path=path: seen.update({path: inputs[0].shape[-2]}))
    wanted.append(LastRows(rows, 29, queries))
    found = logits_of(model, ids)
    assert (found[rows] - whole[rows]).abs().max() <= 1e-5 * whole.abs().max()
    assert not torch.allclose(found, whole)
    # Keys and values of all tokens are kept, so are queries where one projection makes all three.
    kept = ("k_proj", "v_proj", "qkv_proj", "query_key_value", *(() if queries else ("q_proj",)))
    assert seen == {path: 29 if path.endswith(kept) else 3 for path in seen}
    wanted.append(LastRows(None, 29, queries))
    assert torch.equal(logits_of(model, ids), whole)
    wanted.append(LastRows(rows, 29, queries))
    hooks.remove()
    assert torch.equal(logits_of(model, ids), whole)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_left_alone(name: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32).eval()
    ids = torch.randint(3, 100, (1, 29))
    whole = logits_of(model, ids)
    wanted: list[LastRows] = []
    LastLayerRows(model, lambda: wanted[-1] if wanted else None)
    seen: dict[str, int] = {}
    for path, child in last_layer(model).named_children():
        child.register_forward_hook(
            lambda _, inputs, output, path=path: seen.update({path: inputs[0].shape[-2] if inputs else 0})
        )
    wanted.append(LastRows(torch.tensor([28]), 29, queries=True))
    found = logits_of(model, ids)
    assert (found[28] - whole[28]).abs().max() <= 1e-5 * whole.abs().max()
    assert seen["mlp"] == 29
