"""Decoder layers of the Llama kind, of odd sizes."""

import torch

from megakv.attention.layer import ACTIVATIONS, LayerWeights, random_layer


def drawn(most: int) -> int:
    """From 1 on."""
    return int(torch.randint(1, most + 1, ()))


def drawn_layer(dtype: torch.dtype) -> LayerWeights:
    """Its weights."""
    kv_heads = drawn(3)
    sizes = {"hidden": drawn(150), "heads": kv_heads * drawn(4), "kv_heads": kv_heads, "head_dim": 2 * drawn(40)}
    activation = int(torch.randint(len(ACTIVATIONS), ()))
    return random_layer(dtype, torch.default_generator, activation=activation, width=drawn(200), **sizes)
