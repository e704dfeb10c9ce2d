"""What every rank will hold: weights counted on its share, keys and values counted row by row, tensors of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megakv.config import MegaKVConfig
from megakv.costmodel.memory import activation_bytes, offloaded_bytes
from megakv.costmodel.shape import ModelShape
from megakv.dry_run.share import Share
from megakv.fairkv.budgets import is_compressed, tokens_per_head
from megakv.offload.weight_stream import BUFFERS as WEIGHT_BUFFERS

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
    # Off the accelerator: the pages of keys, values and activations, and weights; the latter by themselves.
    host_bytes: int = 0
    host_weight_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """On the accelerator."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


class MemoryCount:
    """Bytes of ranks with one configuration.

    context, new_tokens, batch: prompt and generated tokens of each of so many sequences.
    Raises ValueError if a compression setting does not fit the model or the prompt.
    """

    def __init__(self, config: MegaKVConfig, shape: ModelShape, *, context: int, new_tokens: int, batch: int):
        self._section = config.megakv
        self._shape = shape
        self._cp_size, self._tp_size = config.cp_size, config.tp_size
        self._new, self._context = new_tokens, context
        self._batch = batch
        self._kept_share = 1.0
        fairkv = self._section.fairkv
        if fairkv.budget is not None and is_compressed(fairkv.budget, fairkv.min_tokens, np.array(context)):
            method = fairkv.make_method(len(shape.layers), shape.kv_heads)
            self._kept_share = tokens_per_head(fairkv.budget, context, method.least) / context

    def rank(self, share: Share, cp_rank: int, tokens: int, kept: int) -> VirtualRank:
        """One rank; `tokens` and `kept` as there."""
        # Generated tokens are kept where the prompt is, in about the same shares.
        answer = self._batch * -(-self._new * kept // (self._context * self._batch))
        per_token, largest = sum(share.row_bytes), max(share.row_bytes)
        if self._section.offload.enabled:
            kv, host = offloaded_bytes(
                self._shape, share.row_bytes, kept + answer, batch=self._batch, offload=self._section.offload
            )
        else:
            dense = largest * kept if self._kept_share < 1 else 0
            kv = round(per_token * kept * self._kept_share) + per_token * answer + dense
            host = 0
        weights, held = share.weight_bytes, 0
        if self._section.offload.weights:
            held = sum(share.layer_bytes)
            weights, host = weights - held + WEIGHT_BUFFERS * max(share.layer_bytes), host + held
        return VirtualRank(
            rank=cp_rank * self._tp_size + share.tp_rank,
            cp_rank=cp_rank,
            tp_rank=share.tp_rank,
            tokens=tokens,
            kept=kept,
            weight_bytes=weights,
            kv_bytes=kv,
            activation_bytes=activation_bytes(
                self._shape,
                computed=tokens,
                held=max(tokens, kept),
                row_bytes=largest,
                cp_size=self._cp_size,
                tp_size=self._tp_size,
            ),
            host_bytes=host,
            host_weight_bytes=held,
        )
