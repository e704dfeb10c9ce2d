"""Decoder layers of the Llama kind, of odd sizes, and what PyTorch makes of them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megakv.attention.layer import ACTIVATIONS, LayerWeights, Norm, Weight


def drawn(most: int) -> int:
    """From 1 on."""
    return int(torch.randint(1, most + 1, ()))


def drawn_layer(dtype: torch.dtype) -> LayerWeights:
    """Its weights."""
    kv_heads = drawn(3)
    sizes = {"hidden": drawn(150), "heads": kv_heads * drawn(4), "kv_heads": kv_heads, "head_dim": 2 * drawn(40)}
    activation = int(torch.randint(len(ACTIVATIONS), ()))
    return random_layer(dtype, torch.default_generator, activation=activation, width=drawn(200), **sizes)


def reference(weights: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values ``[L, ...]`` of ``[L, h]``, and the layer's output, by PyTorch in the type of `x`."""

    def normed(x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return norm.weight.to(x) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)).to(x)

    def linear(x: Tensor, part: Weight) -> Tensor:
        return F.linear(x, part.weight.to(x), None if part.bias is None else part.bias.to(x))

    def rotated(x: Tensor) -> Tensor:
        turned = torch.cat((-x[..., weights.head_dim // 2 :], x[..., : weights.head_dim // 2]), dim=-1)
        return x * cos[:, None] + turned * sin[:, None]

    inputs = normed(x, weights.input_norm)
    q, k, v = (linear(inputs, part).unflatten(-1, (-1, weights.head_dim)) for part in (weights.q, weights.k, weights.v))
    middle = x + linear(attended, weights.o)
    inner = normed(middle, weights.output_norm)
    gate = ACTIVATIONS[weights.activation](linear(inner, weights.gate))
    out = middle + linear(gate * linear(inner, weights.up), weights.down)
    return (
        *(part.flatten(1) for part in (rotated(normed(q, weights.q_norm)), rotated(normed(k, weights.k_norm)), v)),
        out,
    )


def random_layer(dtype: torch.dtype, generator: torch.Generator, *, activation: int, **sizes: int) -> LayerWeights:
    """One of a few random weights, with norms of heads and biases where the activation's number is odd."""
    hidden, heads, kv_heads, dim, width = (sizes[name] for name in ("hidden", "heads", "kv_heads", "head_dim", "width"))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype)

    def norm(dim: int) -> Norm:
        return Norm(drawn(dim), 1e-5)

    def weight(outputs: int, inputs: int) -> Weight:
        whole = drawn(outputs, inputs + 7) / inputs**0.5
        return Weight(whole[:, 3 : inputs + 3], drawn(outputs) if activation % 2 else None)

    shapes = {"q": (heads * dim, hidden), "k": (kv_heads * dim, hidden), "v": (kv_heads * dim, hidden)}
    shapes |= {"o": (hidden, heads * dim), "gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    fields: dict[str, Any] = {name: weight(*shape) for name, shape in shapes.items()}
    if activation % 2:
        fields |= {"q_norm": norm(dim), "k_norm": norm(dim)}
    return LayerWeights(heads, kv_heads, dim, activation, norm(hidden), norm(hidden), **fields)
