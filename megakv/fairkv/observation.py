"""How much attention observed queries give to every cached token of this rank.

Queries come from whichever context-parallel rank computed them, with the log-sum-exp of their attention over all keys:
with it a rank has the true attention weights of its own keys and needs no other rank's. Keys never travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.attention.partial import Scoring
from megakv.attention.visibility import visible_pairs
from megakv.fairkv.scoring import EVERYTHING, Reduce, Segment
from megakv.sharding import IntArray, TokenBlock

CHUNK_QUERIES = 512
"""Queries of every rank that travel, and are scored, at a time."""
SCORE_ELEMENTS = 4 << 20
"""Attention weights held at a time (16 MiB in float32)."""


def attention_mass(
    call: AttentionCall, lse_HL: Tensor, segments: Sequence[Segment], observed: int, reduce: Reduce, near: int = 0
) -> list[Tensor]:
    """Attention that the observed queries give to each token: its sum, or peak, over queries and heads of a KV group.

    Parameters
    ----------
    call : AttentionCall
        The layer's attention of this pass; no rank computes another's tokens.
    lse_HL : Tensor
        ``[H, L]`` log-sum-exp of its queries over all keys.
    segments : sequence of Segment
        Of every sequence.
    observed : int
        The last queries of each sequence of this pass, or `EVERYTHING`.
    reduce : {"mean", "peak"}
        Sum (all means are over equally many) or maximum.
    near : int
        Tokens right before a query whose attention from it does not count, nor its own; 0 counts everything.

    Returns
    -------
    list of Tensor
        Per segment ``[K, n]``, float32 (float64 for float64 keys).
    """
    dtype = torch.promote_types(call.q_HLD.dtype, torch.float32)
    masses = [segment.k_KSD.new_zeros(segment.k_KSD.shape[:2], dtype=dtype) for segment in segments]
    rows = _observed_rows(call.layout.tokens, observed)
    packed = torch.cat([call.q_HLD.to(dtype), lse_HL.to(dtype).unsqueeze(-1)], dim=-1).transpose(0, 1)
    for start in range(0, max(map(len, rows)), CHUNK_QUERIES):
        pieces = [found[start : start + CHUNK_QUERIES] for found in rows]
        own = packed[torch.from_numpy(pieces[call.rank]).to(packed.device)]
        for rank, queries in enumerate(_exchanged(call, own, max(map(len, pieces)))):
            tokens = call.layout.tokens[rank].take(pieces[rank])
            for segment, mass in zip(segments, masses, strict=True):
                run = tokens.run(segment.sequence)
                if run.stop > run.start and len(segment.slots):
                    with call.comm.ledger.compute("compression", call.layer):
                        _add_mass(mass, segment, queries[run], tokens.slot[run], call.scoring, reduce, near)
    return masses


def _observed_rows(tokens: Sequence[TokenBlock], observed: int) -> list[IntArray]:
    """Per rank, packed rows of the observed tokens: the last ones of each sequence, wherever they were computed."""
    if observed == EVERYTHING:
        return [np.arange(len(block)) for block in tokens]
    first = []
    for sequence in range(tokens[0].batch):
        slots = np.sort(np.concatenate([block.slot[block.run(sequence)] for block in tokens]))
        first.append(slots[-observed:][0] if len(slots) else 0)
    bounds = np.array(first, dtype=np.int64)
    return [np.flatnonzero(block.slot >= bounds[block.sequence]) for block in tokens]


def _exchanged(call: AttentionCall, own: Tensor, most: int) -> Tensor:
    """``[N, most, H, D + 1]`` every rank's observed queries, filled up to one length."""
    padded = own.new_zeros((most, *own.shape[1:]))
    padded[: len(own)] = own
    return call.comm.cp_all_gather(padded, operation="compression", layer=call.layer)


def _add_mass(
    mass_KS: Tensor, segment: Segment, queries: Tensor, q_slots: IntArray, scoring: Scoring, reduce: Reduce, near: int
) -> None:
    """Count in the weights of ``[L, H, D + 1]`` queries, with their log-sum-exp, in tiles of keys."""
    heads, rows = queries.shape[1], queries.shape[0]
    kv_heads, count, _ = segment.k_KSD.shape
    group = heads // kv_heads
    q = queries[..., :-1].transpose(0, 1).reshape(kv_heads, group * rows, -1) * scoring.scale
    lse = queries[..., -1].t().reshape(kv_heads, group * rows, 1)
    tile = max(1, SCORE_ELEMENTS // (heads * rows))
    for a in range(0, count, tile):
        keys = slice(a, min(a + tile, count))
        slots = segment.slots[keys]
        if slots[0] > q_slots[-1]:
            break
        scores = torch.bmm(q, segment.k_KSD[:, keys].to(q.dtype).transpose(1, 2))
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if scoring.alibi_slopes is not None:
            distance = torch.from_numpy(segment.positions[None, keys] - q_slots[:, None]).to(scores)
            bias = scoring.alibi_slopes.to(scores)[:, None, None] * distance
            scores = scores + bias.reshape(kv_heads, group * rows, -1)
        weights = scores.sub_(lse).exp_()
        # The last slot that every query looks at from afar.
        far = q_slots[0] - near - 1 if near else q_slots[0]
        if slots[-1] > far or (scoring.window is not None and slots[0] <= q_slots[-1] - scoring.window):
            counts = visible_pairs(q_slots, slots, scoring.window)
            if near:
                counts &= q_slots[:, None] - slots[None, :] > near
            unseen = torch.from_numpy(~counts).to(weights.device)
            weights.view(kv_heads, group, rows, -1).masked_fill_(unseen, 0.0)
        if reduce == "mean":
            mass_KS[:, keys] += weights.sum(1)
        else:
            mass_KS[:, keys] = torch.maximum(mass_KS[:, keys], weights.amax(1))


def pooled_mass(
    call: AttentionCall, masses: Sequence[Tensor], segments: Sequence[Segment], radius: int
) -> list[Tensor]:
    """The maximum over every token's neighbours, those on other ranks included.

    Only tokens next to another rank's travel.

    Parameters
    ----------
    call : AttentionCall
    masses : sequence of Tensor
        Per segment ``[K, n]``.
    segments : sequence of Segment
    radius : int
        Neighbours on either side.
    """
    edges = [_edges(segment.orders, radius) for segment in segments]
    counts = [sum(len(edge[rank]) for edge in edges) for rank in range(call.size)]
    pieces = [
        mass[:, torch.from_numpy(np.searchsorted(segment.orders[call.rank], edge[call.rank])).to(mass.device)]
        for mass, segment, edge in zip(masses, segments, edges, strict=True)
    ]
    gathered = None
    if max(counts):
        padded = masses[0].new_zeros((masses[0].shape[0], max(counts)))
        padded[:, : counts[call.rank]] = torch.cat(pieces, dim=1)
        gathered = call.comm.cp_all_gather(padded, operation="compression", layer=call.layer)
    pooled, starts = [], [0] * call.size
    for mass, segment, edge in zip(masses, segments, edges, strict=True):
        orders, values = [segment.orders[segment.rank]], [mass]
        for rank, found in enumerate(edge):
            if rank != call.rank and gathered is not None:
                orders.append(found)
                values.append(gathered[rank][:, starts[rank] : starts[rank] + len(found)])
            starts[rank] += len(found)
        pooled.append(_neighbour_maximum(segment, np.concatenate(orders), torch.cat(values, dim=1), radius))
    return pooled


def coarse_peaks(mass_KS: Tensor) -> Tensor:
    """Peaks without their last 7 bits, in float32.

    Many tokens are looked at with a weight of almost exactly 1: which of them is the highest would otherwise depend on
    rounding, and so on the mesh.
    """
    bits = mass_KS.float().contiguous().view(torch.int32)
    return ((bits + 64) & -128).view(torch.float32).to(mass_KS.dtype)


def _edges(orders: Sequence[IntArray], radius: int) -> list[IntArray]:
    """Per rank, the ordinals of its tokens that have a token of another rank within the radius."""
    owner = np.empty(sum(map(len, orders)), dtype=np.int64)
    for rank, order in enumerate(orders):
        owner[order] = rank
    near = np.zeros(len(owner), dtype=bool)
    for distance in range(1, min(radius, len(owner) - 1) + 1):
        foreign = owner[distance:] != owner[:-distance]
        near[distance:] |= foreign
        near[:-distance] |= foreign
    return [order[near[order]] for order in orders]


def _neighbour_maximum(segment: Segment, orders: IntArray, values: Tensor, radius: int) -> Tensor:
    own = segment.orders[segment.rank]
    if not len(own):
        return values[:, :0]
    by_order = np.argsort(orders)
    known = orders[by_order]
    best = values[:, : len(own)].clone()
    for distance in range(-radius, radius + 1):
        place = np.minimum(np.searchsorted(known, own + distance), len(known) - 1)
        there = np.flatnonzero(known[place] == own + distance)
        if distance and len(there):
            index = torch.from_numpy(there).to(values.device)
            source = torch.from_numpy(by_order[place[there]]).to(values.device)
            best[:, index] = torch.maximum(best[:, index], values[:, source])
    return best
