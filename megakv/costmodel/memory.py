"""Bytes that a rank holds: weights, keys and values, and what a layer works with."""

from __future__ import annotations

from dataclasses import dataclass

from megakv.costmodel.offload import may_pay
from megakv.costmodel.shape import ModelShape

HIDDEN_WIDTHS = 4
"""Tensors of the hidden width at a time: embeddings, a layer's input, its residual, and what was normed."""
QUERY_WIDTHS = 6
"""Tensors of all query heads, at attention's peak: before and after rotation, and two float32 ones of output."""
STAGING_SLACK = 16
"""A staging buffer that is too small grows by this fraction more than needed."""
STAGED_LAYERS = 2
RING_SHARDS = 2
"""Shards of one layer that a ring keeps on their way."""


def grown_bytes(nbytes: int) -> int:
    """Bytes of a staging buffer that had to grow to so many."""
    return nbytes + nbytes // STAGING_SLACK


def working_bytes(model: ModelShape, *, tp_size: int = 1) -> int:
    """Bytes of one token's tensors in one layer."""
    queries = QUERY_WIDTHS * model.heads * model.key_dim
    gates = model.feed_forward_tensors * model.intermediate * max(layer.active_experts for layer in model.layers)
    widths = HIDDEN_WIDTHS * model.hidden + max(gates, queries) // tp_size
    return widths * model.element_bytes


def activation_bytes(
    model: ModelShape, *, computed: int, held: int, row_bytes: int, cp_size: int = 1, tp_size: int = 1
) -> int:
    """Bytes that a rank works with at a layer's peak: the layer's tensors, and the shards of a ring on their way.

    computed, held: tokens that it computes, and those whose keys and values travel.
    row_bytes: keys and values of a token in one layer.
    """
    ring = RING_SHARDS * held * row_bytes if cp_size > 1 else 0
    return computed * working_bytes(model, tp_size=tp_size) + ring


def token_bytes(model: ModelShape, *, tp_size: int = 1) -> int:
    """Bytes that one token of a prompt takes on a rank that reads it alone: keys, values, and tensors of one layer."""
    kept = len(model.layers) * model.attention(tp_size=tp_size).kv_row_bytes
    return kept + working_bytes(model, tp_size=tp_size)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the fullest rank."""

    weights: int  # On the accelerator.
    cache: int
    working: int
    # In host memory: keys and values that are offloaded, and activations that they may be recomputed from.
    host: int = 0
    disk: int = 0  # On disk: what of those has no room there.

    @property
    def total(self) -> int:
        """All that is on the accelerator."""
        return self.weights + self.cache + self.working


def rank_memory(
    model: ModelShape,
    *,
    context: int,
    batch: int = 1,
    new: int | None = None,
    cp_size: int = 1,
    tp_size: int = 1,
    kept_share: float = 1.0,
    offloaded: bool = False,
) -> RankMemory:
    """Memory of a rank of a mesh.

    Weights of layers are cut over the tensor-parallel ranks, embeddings and the output head are whole on each of them.
    Keys and values are cut over all: their heads over the tensor-parallel
    ranks, as far as there are any to cut, their tokens over the context-parallel ones.

    context: tokens of a sequence at the end.
    batch: sequences.
    new: tokens of a sequence that are computed at a time; None: all.
    kept_share: what part of keys and values compression keeps.
    offloaded: whether those lie off the accelerator.
    Raises ValueError if a size is not positive, or the share not in 0 to 1.
    """
    sizes = {"context": context, "batch": batch, "new": context if new is None else new}
    sizes |= {"cp_size": cp_size, "tp_size": tp_size}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} = {size}: allowed: 1 or more")
    if not 0 <= kept_share <= 1:
        raise ValueError(f"kept_share = {kept_share}: allowed: 0 to 1")
    row = model.attention(tp_size=tp_size).kv_row_bytes
    kept, computed = -(-context // cp_size) * batch, -(-sizes["new"] // cp_size) * batch
    cache = len(model.layers) * kept * row * kept_share
    if offloaded:
        # Two layers' worth is on the accelerator: the one at work, and the next; with activations that are recomputed.
        inputs = model.hidden * model.element_bytes
        staged = kept * (row * kept_share + (inputs if may_pay(inputs, row) else 0))
        cache = min(cache, STAGED_LAYERS * grown_bytes(round(staged)))
    whole = model.embedding * model.element_bytes
    return RankMemory(
        weights=whole + -(-(model.weight_bytes - whole) // tp_size),
        cache=round(cache),
        working=activation_bytes(model, computed=computed, held=kept, row_bytes=row, cp_size=cp_size, tp_size=tp_size),
    )
