"""Bytes that a rank holds, for the planner and the dry run: weights, keys and values, and what a layer works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megakv.cache.segments import held_rows
from megakv.costmodel.shape import ModelShape
from megakv.costmodel.stored_rows import OffloadSizes, may_pay, page_bytes, stored_bytes

RESERVE = 0.05
"""What part of an accelerator's memory is left to allocator and libraries."""
HIDDEN_WIDTHS = 4
"""Tensors of the hidden width at a time: embeddings, a layer's input, its residual, and what was normed."""
QUERY_WIDTHS = 6
"""Tensors of all query heads, at attention's peak: before and after rotation, and two float32 ones of output."""
STAGING_SLACK = 16
"""A staging buffer that is too small grows by this fraction more than needed."""
STAGED_LAYERS = 2
"""Layers whose keys and values are on the accelerator at a time: the one at work, and the next."""
WEIGHT_BUFFERS = 2
"""Layers whose weights are on the accelerator at a time, where weights are offloaded."""
RING_SHARDS = 2
"""Shards of one layer that a ring keeps on their way."""
GIB = 1 << 30


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
    """Bytes at a layer's peak: tensors of the tokens that a rank computes, and a ring's shards of those held."""
    ring = RING_SHARDS * held * row_bytes if cp_size > 1 else 0
    return computed * working_bytes(model, tp_size=tp_size) + ring


def grouped_tokens(tokens: int, batch: int, groups: int) -> tuple[int, int]:
    """Of a batch's tokens that go through layers in groups: those that a layer works with at a time, and all others."""
    computed = -(-tokens // min(groups, batch))
    return computed, tokens - computed


def waiting_bytes(model: ModelShape, tokens: int) -> int:
    """Bytes of tokens that wait while a layer works with others: what comes in, and what has come out."""
    return 2 * model.hidden * model.element_bytes * tokens


def token_bytes(model: ModelShape, *, tp_size: int = 1) -> int:
    """Bytes that one token of a prompt takes on a rank that reads it alone: keys, values, and tensors of one layer."""
    kept = len(model.layers) * model.attention(tp_size=tp_size).kv_row_bytes
    return kept + working_bytes(model, tp_size=tp_size)


def held_tokens(model: ModelShape, tokens: int, *, batch: int, new: int | None = None) -> list[int]:
    """Of a rank's tokens of all sequences, those whose keys and values each layer holds: windows leave some behind.

    `new` tokens of a sequence are computed at a time, None for all: a pass that goes on from others adds them.
    """
    each = -(-tokens // batch)
    piece = new if new is not None and new < each else 0
    return [
        tokens if layer.window is None else min(tokens, batch * (held_rows(layer.window, each) + piece))
        for layer in model.layers
    ]


def cached_bytes(rows: Sequence[int], held: Sequence[int], whole: int) -> int:
    """Bytes at most, given those of a row in each layer: `whole` is a prompt that one layer at a time has all of."""
    pairs = list(zip(rows, held, strict=True))
    return sum(row * count for row, count in pairs) + max(row * max(0, whole - count) for row, count in pairs)


def offloaded_bytes(
    model: ModelShape,
    rows: Sequence[int],
    tokens: int,
    *,
    batch: int,
    offload: OffloadSizes,
    recomputes: bool = True,
    new: int | None = None,
    compressed: int = 0,
) -> tuple[int, int]:
    """Bytes on the accelerator and off it of tokens of all sequences; `rows` are the bytes of one in each layer.

    Without `recomputes` no method keeps activations. Beside them compression has kept as much as `compressed` tokens.
    """
    head = (model.key_dim + model.value_dim if model.row_dim is None else model.row_dim) * model.element_bytes
    inputs, stored_head = model.input_bytes, stored_bytes(model, head, offload)
    held, page = held_tokens(model, tokens, batch=batch, new=new), offload.page_bytes
    host = staged = packed = most = 0
    for row, count in zip(rows, held, strict=True):
        stored = stored_bytes(model, row, offload)
        kept = inputs if recomputes and offload.recomputes and may_pay(inputs, stored) else 0
        # Every sequence has its own pages in every layer; a window begins anywhere in one.
        here, all_rows = (
            batch * sum(page_bytes(-(-number // batch), width, page) for width in (stored, kept) if width)
            for number in (count, tokens)
        )
        here = min(all_rows, here + (batch * 2 * page if count < tokens else 0))
        # One layer at a time has all of a prompt that is read whole.
        host, most = host + here, max(most, all_rows - here) if new is None else 0
        host += batch * page_bytes(-(-compressed * row // (batch * head)), stored_head, page)
        # At most: all may be recomputed, and all that comes in few bits lies beside what it stands for.
        beside = 0 if offload.kv_bits is None else stored
        packed, staged = max(packed, beside), max(staged, row + kept + beside)
    together, bodies = (-(-count // min(offload.groups, batch)) for count in (tokens, compressed))
    resident = min(offload.device_bytes, sum(rows) * tokens)
    buffers = grown_bytes(staged * together) + grown_bytes((max(rows) + packed) * bodies)
    return STAGED_LAYERS * buffers + resident, host + most


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the fullest rank."""

    weights: int  # On the accelerator.
    cache: int
    working: int
    # In host memory: keys and values that are offloaded, activations that they may be recomputed from, and weights.
    host: int = 0
    disk: int = 0  # On disk: what of those has no room there.
    host_weights: int = 0  # Of what is in host memory, weights.

    @property
    def total(self) -> int:
        """All that is on the accelerator."""
        return self.weights + self.cache + self.working


@dataclass(frozen=True)
class RankShare:
    """What one tensor-parallel rank has of a model, in bytes: counted, or divided evenly."""

    weight_bytes: int  # Of parameters and buffers.
    row_bytes: tuple[int, ...]  # Per layer, one token's keys and values.
    layer_bytes: tuple[int, ...]  # Per layer, the weights that may be off the accelerator.
    tp_rank: int = 0

    @classmethod
    def even(cls, model: ModelShape, tp_size: int) -> RankShare:
        """Layers are cut over the ranks, embeddings and the output head are whole on each."""
        row, whole = model.attention(tp_size=tp_size).kv_row_bytes, model.outside_bytes
        layers, count = -(-(model.weight_bytes - whole) // tp_size), len(model.layers)
        first = (layers // count,) * (count - 1)
        return cls(whole + layers, (row,) * count, (*first, layers - sum(first)))


def share_memory(
    model: ModelShape,
    share: RankShare,
    *,
    computed: int,
    kept: int,
    batch: int,
    answer: int = 0,
    new: int | None = None,
    cp_size: int = 1,
    tp_size: int = 1,
    kept_share: float = 1.0,
    offload: OffloadSizes | None = None,
    recomputes: bool = True,
    weights_away: bool = False,
) -> RankMemory:
    """Memory of a rank with some tokens of the batch: those that it computes, and keeps of a prompt and an answer.

    new, recomputes: as for `held_tokens` and `offloaded_bytes`; the others as for `rank_memory`.
    """
    rows, tokens, compresses, host = share.row_bytes, kept + answer, kept_share < 1, 0
    if offload is not None:
        cache, host = offloaded_bytes(
            model,
            rows,
            answer if compresses else tokens,
            batch=batch,
            offload=offload,
            recomputes=recomputes,
            new=None if compresses else new,
            compressed=round(kept * kept_share) if compresses else 0,
        )
    elif compresses:
        cache = round(sum(rows) * kept * kept_share) + sum(rows) * answer
    else:
        held = held_tokens(model, tokens, batch=batch, new=new)
        cache = cached_bytes(rows, held, tokens if new is None else 0)
    # Until compression has chosen, a layer has all tokens that it is given.
    cache += max(rows) * min(kept, kept if new is None else batch * new) * compresses
    groups = offload.groups if offload is not None and cp_size == 1 else 1
    together, waiting = grouped_tokens(computed, batch, groups)
    sizes = {"held": max(computed, kept), "row_bytes": max(rows), "cp_size": cp_size, "tp_size": tp_size}
    away = sum(share.layer_bytes) if weights_away else 0
    return RankMemory(
        weights=share.weight_bytes - away + min(away, WEIGHT_BUFFERS * max(share.layer_bytes)),
        cache=cache,
        working=waiting_bytes(model, waiting) + activation_bytes(model, computed=together, **sizes),
        host=host + away,
        host_weights=away,
    )


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
    weights_away: bool = False,
    groups: int = 1,
) -> RankMemory:
    """Memory of a rank of a mesh, whose ranks hold equal shares of heads and tokens.

    context: tokens of a sequence at the end.
    new: tokens of a sequence that are computed at a time; None: all.
    kept_share: what part of keys and values compression keeps.
    offloaded, weights_away: whether keys and values, and weights of layers, are off the accelerator.
    groups: those of a batch that layers take one behind the other, where keys and values are offloaded.
    """
    kept, computed = -(-context // cp_size) * batch, -(-(new or context) // cp_size) * batch
    return share_memory(
        model,
        RankShare.even(model, tp_size),
        computed=computed,
        kept=kept,
        batch=batch,
        new=None if new is None or new >= context else -(-new // cp_size),
        cp_size=cp_size,
        tp_size=tp_size,
        kept_share=kept_share,
        offload=OffloadSizes(groups=groups) if offloaded else None,
        weights_away=weights_away,
    )
