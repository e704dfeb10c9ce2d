"""What every rank will hold: weights counted on its share, keys and values counted row by row, tensors of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megakv.costmodel.memory import (
    WEIGHT_BUFFERS,
    activation_bytes,
    cached_bytes,
    grouped_tokens,
    held_tokens,
    offloaded_bytes,
    waiting_bytes,
)
from megakv.costmodel.shape import ModelShape
from megakv.engine.config import MegaKVConfig
from megakv.fairkv.budgets import is_compressed, tokens_per_head
from megakv.planner.dry_run.share import Share

GB = 10**9


@dataclass(frozen=True)
class VirtualRank:
    """One rank of the mesh."""

    rank: int
    cp_rank: int
    tp_rank: int
    tokens: int  # Whose queries it computes, over the batch.
    kept: int  # Whose keys and values it keeps, before compression.
    # On the accelerator: weights and buffers; keys and values when the prompt is read, where they are compressed with
    # the one layer that is not yet, where they are offloaded only staging buffers and what stays; tensors of the layer
    # under way and the shards that a ring keeps on their way, as the cost model estimates them.
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    # Off the accelerator: the pages of keys, values and activations, and weights; the latter by themselves, which lie
    # all in host memory or all on disk.
    host_bytes: int = 0
    host_weight_bytes: int = 0
    disk_weight_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """On the accelerator."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


def kept_share(config: MegaKVConfig, shape: ModelShape, context: int) -> float:
    """What part of a prompt's keys and values is kept.

    Raises ValueError if a compression setting does not fit the model or the prompt.
    """
    fairkv = config.megakv.fairkv
    if fairkv.budget is None or not is_compressed(fairkv.budget, fairkv.min_tokens, np.array(context)):
        return 1.0
    least = fairkv.make_method(len(shape.layers), shape.cached_heads).least
    return tokens_per_head(fairkv.budget, context, least) / context


def virtual_rank(
    config: MegaKVConfig, shape: ModelShape, share: Share, cp_rank: int, *, tokens: int, kept: int, answer: int,
    batch: int, kept_share: float,
) -> VirtualRank:  # fmt: skip
    """Bytes of one rank; `tokens` and `kept` as there, and `answer` generated tokens that are kept beside them."""
    offload, largest = config.megakv.offload, max(share.row_bytes)
    if offload.enabled:
        # As in the engine, what a last rank collects comes without activations.
        given: dict[str, Any] = {"batch": batch, "offload": offload.sizes}
        given["recomputes"] = config.megakv.runahead.kv == "sharded" or config.cp_size == 1
        if kept_share < 1:
            kv, host = offloaded_bytes(shape, share.row_bytes, answer, compressed=round(kept * kept_share), **given)
            kv += largest * kept
        else:
            kv, host = offloaded_bytes(shape, share.row_bytes, kept + answer, **given)
    else:
        if kept_share < 1:
            kv = round(sum(share.row_bytes) * kept * kept_share) + sum(share.row_bytes) * answer + largest * kept
        else:
            kv = cached_bytes(share.row_bytes, held_tokens(shape, kept + answer, batch=batch), kept + answer)
        host = 0
    weights, held = share.weight_bytes, 0
    if offload.weights:
        held = sum(share.layer_bytes)
        weights, host = weights - held + WEIGHT_BUFFERS * max(share.layer_bytes), host + held
    sizes = {"cp_size": config.cp_size, "tp_size": config.tp_size}
    divided = offload.enabled and config.cp_size == 1
    computed, waiting = grouped_tokens(tokens, batch, offload.groups if divided else 1)
    working = activation_bytes(shape, computed=computed, held=max(tokens, kept), row_bytes=largest, **sizes)
    return VirtualRank(
        rank=cp_rank * config.tp_size + share.tp_rank,
        cp_rank=cp_rank,
        tp_rank=share.tp_rank,
        tokens=tokens,
        kept=kept,
        weight_bytes=weights,
        kv_bytes=kv,
        activation_bytes=working + waiting_bytes(shape, waiting),
        host_bytes=host,
        host_weight_bytes=0 if offload.weights == "disk" else held,
        disk_weight_bytes=held if offload.weights == "disk" else 0,
    )
