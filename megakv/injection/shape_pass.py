"""A forward pass on the meta device: every layer's own code runs, and only shapes come out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.cache.cache import ShardedCache
from megakv.distributed.sharding import TokenBlock, balanced
from megakv.injection.interface import AttentionRuntime
from megakv.injection.ownership import attach
from megakv.injection.policy import takes_positions
from megakv.weights.placement.plan import is_experts


def shape_pass(model: PreTrainedModel, runtime: AttentionRuntime, tokens: int) -> tuple[int, Tensor]:
    """Run a model over one packed row; returns how many attention layers a cache has for it, and its logits.

    The model's parameters are on the meta device. Its buffers follow them there, and it is switched to the attention of
    `runtime`, which is called with tensors that have no values.
    """
    for module in model.modules():
        # The code of rotary embeddings looks at values.
        if not hasattr(module, "rope_type"):
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to("meta")
    if any(is_experts(module) for module in model.modules()):
        # Of the ways to compute experts the one that asks for no tokens' values and no alignment.
        model.set_experts_implementation("batched_mm")
    # Some models look for padding among the tokens, to warn of it; not every config takes None for an answer.
    vars(model.config)["pad_token_id"] = None
    layers = attach(model, runtime)
    cache = ShardedCache(layers, size=1, rank=0)
    slots = np.arange(tokens, dtype=np.int64)
    cache.begin(balanced(TokenBlock(np.zeros_like(slots), slots, slots, 1), 1), 1)
    row = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    inputs: dict[str, Any] = {
        "input_ids": row,
        "position_ids": row,
        "past_key_values": cache,
        "use_cache": True,
        "return_dict": True,
        "logits_to_keep": row[0, :1],
    }
    known = {*inspect.signature(type(model).forward).parameters, *(["position_ids"] if takes_positions(model) else [])}
    with torch.no_grad(), _rotary_on_cpu(model, tokens):
        return layers, model(**{name: value for name, value in inputs.items() if name in known}).logits


@contextmanager
def _rotary_on_cpu(model: nn.Module, tokens: int) -> Iterator[None]:
    """Let rotary embeddings compute real angles of real positions, of which only shapes go on."""
    positions = torch.arange(tokens).unsqueeze(0)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        def real(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return positions if value.dtype == torch.int64 else torch.empty(0, dtype=value.dtype)

        return tuple(map(real, args)), {name: real(value) for name, value in kwargs.items()}

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return tuple(part.to("meta") for part in output) if isinstance(output, tuple) else output.to("meta")

    handles = []
    for module in model.modules():
        if hasattr(module, "rope_type"):
            handles += [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
