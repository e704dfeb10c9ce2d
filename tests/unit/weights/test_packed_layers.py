"""Compiled calls of layers whose linears are in blocks of several types, against those of what they unpack to."""

from dataclasses import replace

import pytest
import torch

from megakv.attention.layer import LayerCalls, LayerWeights, Weight, load_layer
from megakv.weights.blocks import BLOCKS, unpack
from tests.drawn_layers import random_layer
from tests.packed import drawn_packed

LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def drawn_kind(columns: int) -> str:
    fitting = [name for name, block in BLOCKS.items() if columns % block.elements == 0]
    return fitting[int(torch.randint(len(fitting), ()))]


def packed_layer(dtype: torch.dtype) -> tuple[LayerWeights, LayerWeights]:
    """A layer, some linears of which are in blocks, and the same with what they unpack to, in float32."""
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "width": 288}
    plain = random_layer(dtype, torch.default_generator, activation=int(torch.randint(2, ())), **sizes)
    packed, wide = {}, {}
    for name in LINEARS:
        part: Weight = getattr(plain, name)
        if torch.rand(()) < 0.2:
            continue
        kind = drawn_kind(part.weight.shape[1])
        blocks = drawn_packed(*part.weight.shape, kind)
        packed[name] = Weight(blocks, part.bias, BLOCKS[kind].number, part.weight.shape[1])
        wide[name] = replace(part, weight=unpack(blocks, kind))
    norms = {name: getattr(plain, name) for name in ("input_norm", "output_norm", "q_norm", "k_norm")}
    widened = {name: wide.get(name, getattr(plain, name)) for name in LINEARS}
    widened = {
        name: Weight(w.weight.float(), None if w.bias is None else w.bias.float()) for name, w in widened.items()
    }
    fields = {name: norm and replace(norm, weight=norm.weight.float()) for name, norm in norms.items()}
    return replace(plain, **packed), replace(plain, **widened, **fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers(dtype: torch.dtype) -> None:
    kernel, reason = load_layer()
    if kernel is None:
        pytest.skip(f"no compiled kernel: {reason}")
    for rows in (1, 3, 9, 16, 17, 70):
        packed, wide = packed_layer(dtype)
        x, cos, sin, attended = (torch.randn(rows, size).to(dtype) for size in (256, 64, 64, 256))
        mine, right = LayerCalls(kernel, packed), LayerCalls(kernel, wide)
        results = [mine.project(x, cos, sin, whole=True)]
        results += mine.feed_forward(x, attended, projected=False, whole=True)
        expected = [right.project(*(each.float() for each in (x, cos, sin)), whole=True)]
        expected += right.feed_forward(x.float(), attended.float(), projected=False, whole=True)
        bound = 1e-5 if dtype == torch.float32 else 12 * torch.finfo(dtype).eps
        for found, other in zip(results, expected, strict=True):
            assert float((found.float() - other).abs().max()) <= bound * float(other.abs().max())
