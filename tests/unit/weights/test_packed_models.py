"""Models, and slices of linears, in blocks of all types against what they unpack to."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import megakv
from megakv.injection.linears import Slice, cut_columns
from megakv.weights.blocks import BLOCKS, NUMBERED, unpack
from megakv.weights.packed_linear import PackedLinear, pack_modules
from tests.packed import drawn_packed


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def packed_model(*, hidden: int = 256) -> tuple[nn.Module, nn.Module]:
    """A Llama with linears of all types of blocks, and the same with what they unpack to."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    packed, plain = (AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval() for _ in range(2))
    plain.load_state_dict(packed.state_dict())
    names = [f"{name}.weight" for name, module in packed.named_modules() if isinstance(module, nn.Linear)]
    kinds = {name: list(BLOCKS)[at % len(BLOCKS)] for at, name in enumerate(names)}
    pack_modules(packed, kinds, torch.float32)
    for name, kind in kinds.items():
        weight = plain.get_parameter(name)
        blocks = drawn_packed(*weight.shape, kind)
        packed.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(blocks, requires_grad=False)
        weight.data.copy_(unpack(blocks, kind))
    return packed, plain


def test_models() -> None:
    """Prompts and steps of a model whose layers are compiled calls."""
    packed, plain = packed_model()
    with megakv.init_inference(packed, {"megakv": {}}) as engine:
        for length in (1, 9, 40, 90):
            ids = torch.randint(512, (1, length))
            given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
            assert torch.equal(engine.generate(ids, **given), plain.generate(ids, **given))


def test_slices() -> None:
    """Rows anywhere, and columns between blocks: together the whole."""
    for kind, block in BLOCKS.items():
        columns, outputs = 5 * block.elements, 37
        linear = PackedLinear(nn.Linear(columns, outputs, device="meta"), kind, nn.Parameter(torch.empty(0)))
        linear.weight = nn.Parameter(drawn_packed(outputs, columns, kind), requires_grad=False)
        linear.bias = nn.Parameter(torch.randn(outputs))
        x, size = torch.randn(3, columns), int(torch.randint(1, 8, ()))
        expected = linear(x)
        runs = [cut_columns(linear, rank, size) for rank in range(size)]
        assert (
            runs[0][0] == 0 and runs[-1][1] == columns and all(end % block.elements == 0 for run in runs for end in run)
        )
        parts = [Slice(linear, columns=run).product(x[:, slice(*run)]) for run in runs if run[1] > run[0]]
        torch.testing.assert_close(sum(parts) + linear.bias, expected, rtol=1e-4, atol=1e-4)
        stop = int(torch.randint(1, outputs, ()))
        rows = [Slice(linear, rows=ends).product(x) for ends in ((0, stop), (stop, outputs))]
        torch.testing.assert_close(torch.cat(rows, dim=1), expected, rtol=1e-5, atol=1e-5)
        part = Slice(linear, columns=runs[0]).part()
        assert NUMBERED[part.blocks] is block and part.columns == runs[0][1]
