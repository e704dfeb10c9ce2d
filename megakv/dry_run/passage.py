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

from megakv.attention.partial import Scoring
from megakv.cache import ShardedCache
from megakv.errors import MegaKVError
from megakv.injection.interface import attach
from megakv.injection.policy import policy_for
from megakv.placement import HeadMap
from megakv.placement.plan import is_experts
from megakv.sharding import TokenBlock, balanced


class ShapeRuntime:
    """Attention that only compares the heads it is given with the head map, and counts what a cache would hold.

    Parameters
    ----------
    head_map : HeadMap
    tp_rank : int

    Attributes
    ----------
    row_bytes : dict
        Per layer, bytes of one token's keys and values.
    """

    def __init__(self, head_map: HeadMap, tp_rank: int):
        self._head_map = head_map
        self._tp_rank = tp_rank
        self.row_bytes: dict[int, int] = {}

    def attend(
        self, layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """``[1, L, H, Dv]`` without values.

        Raises
        ------
        MegaKVError
            If there are other heads than this rank has, or rows do not belong together.
        """
        shard = self._head_map.shard(layer, self._tp_rank)
        heads, kv_heads = len(shard.query_heads), len(shard.kv_heads)
        found = q_BHSD.shape[1], k_BKSD.shape[1], v_BKSD.shape[1]
        # ALiBi lies in an extra column of the keys, one for each query head.
        if found not in ((heads, kv_heads, kv_heads), (heads, heads, heads)):
            raise MegaKVError(
                f"layer {layer}, tensor-parallel rank {self._tp_rank}: attention got (query, key, value) heads "
                f"{found}, the head map has {heads} query heads and {kv_heads} KV heads there"
            )
        rows = {tensor.shape[2] for tensor in (q_BHSD, k_BKSD, v_BKSD)}
        if len(rows) > 1 or q_BHSD.shape[3] != k_BKSD.shape[3]:
            raise MegaKVError(
                f"layer {layer}: shapes of queries {list(q_BHSD.shape)}, keys {list(k_BKSD.shape)} and values "
                f"{list(v_BKSD.shape)} do not fit each other"
            )
        self.row_bytes[layer] = sum(
            tensor.shape[1] * tensor.shape[3] * tensor.element_size() for tensor in (k_BKSD, v_BKSD)
        )
        return q_BHSD.new_empty((1, q_BHSD.shape[2], heads, v_BKSD.shape[3]))


def run_shapes(model: PreTrainedModel, head_map: HeadMap, tp_rank: int, tokens: int) -> dict[int, int]:
    """Run one rank's share over `tokens` of its tokens.

    Parameters
    ----------
    model : PreTrainedModel
        On the meta device, cut for this rank.
    head_map : HeadMap
    tp_rank : int
    tokens : int
        1 or more.

    Returns
    -------
    dict
        Per layer, bytes of one token's keys and values.

    Raises
    ------
    MegaKVError
        If shapes do not fit.
    """
    _to_meta(model)
    if any(is_experts(module) for module in model.modules()):
        # Of the ways to compute experts the one that asks for no tokens' values and no alignment.
        model.set_experts_implementation("batched_mm")
    runtime = ShapeRuntime(head_map, tp_rank)
    layers = attach(model, runtime, policy_for(model.config.model_type))
    cache = ShardedCache(layers, size=1, rank=0)
    slots = np.arange(tokens, dtype=np.int64)
    cache.begin(balanced(TokenBlock(np.zeros_like(slots), slots, slots, 1), 1), 1)
    inputs: dict[str, Any] = {
        "input_ids": torch.empty(1, tokens, dtype=torch.int64, device="meta"),
        "position_ids": torch.empty(1, tokens, dtype=torch.int64, device="meta"),
        "past_key_values": cache,
        "use_cache": True,
        "return_dict": True,
        "logits_to_keep": 1,
    }
    known = inspect.signature(type(model).forward).parameters
    with torch.no_grad(), _rotary_on_cpu(model, tokens):
        try:
            logits = model(**{name: value for name, value in inputs.items() if name in known}).logits
        except (RuntimeError, IndexError, AssertionError) as error:
            raise MegaKVError(
                f"tensor-parallel rank {tp_rank}: shapes of {type(model).__name__} do not fit: {error}"
            ) from error
    vocab = model.config.get_text_config().vocab_size
    if logits.shape[-1] != vocab or len(runtime.row_bytes) != layers:
        raise MegaKVError(
            f"tensor-parallel rank {tp_rank}: {len(runtime.row_bytes)} of {layers} layers called attention, logits "
            f"have shape {list(logits.shape)} for a vocabulary of {vocab}"
        )
    return runtime.row_bytes


def _to_meta(model: nn.Module) -> None:
    """Move all buffers to the meta device but those of rotary embeddings, whose code looks at values."""
    for module in model.modules():
        if not hasattr(module, "rope_type"):
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to("meta")


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
