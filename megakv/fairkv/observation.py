"""How much attention observed queries give to every cached token of this rank.

Queries come from whichever context-parallel rank computed them, with the log-sum-exp of their attention over all keys:
with it a rank has the true attention weights of its own keys and needs no other rank's. Keys never travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megakv.attention.method import AttentionCall
from megakv.attention.partial import Scoring
from megakv.base.device import upload
from megakv.distributed.sharding import IntArray, TokenBlock
from megakv.fairkv.attention_weights import SCORE_ELEMENTS, ScoredQueries
from megakv.fairkv.method import EVERYTHING, Segment

CHUNK_QUERIES = 512
"""Queries of every rank that travel, and are scored, at a time."""


@dataclass(frozen=True)
class Queries:
    """Queries of some tokens, each counted on one rank.

    `tokens` are those of every context-parallel rank; `packed` ``[L, H, D + 1]`` this rank's, with the log-sum-exp of
    their attention over all keys.
    """

    tokens: tuple[TokenBlock, ...]
    packed: Tensor

    @classmethod
    def of_pass(cls, call: AttentionCall, lse_HL: Tensor, observed: int) -> Queries:
        """Those of a pass, or of the last `observed` tokens that it has of each sequence."""
        layout = call.layout
        # Where every rank computes every token, each is counted where it is kept.
        tokens = layout.stored if layout.replicated else layout.tokens
        rows = _observed_rows(tokens, observed)
        own = rows[call.rank] if (kept := layout.kept_rows(call.rank)) is None else kept[rows[call.rank]]
        index = upload(own, lse_HL.device)
        dtype = torch.promote_types(call.q_HLD.dtype, torch.float32)
        q_HLD, lse = call.q_HLD.index_select(1, index).to(dtype), lse_HL.index_select(1, index).to(dtype)
        packed = torch.cat([q_HLD, lse.unsqueeze(-1)], dim=-1).transpose(0, 1)
        return cls(tuple(block.take(found) for block, found in zip(tokens, rows, strict=True)), packed)

    def after(self, earlier: Queries, observed: int, rank: int) -> Queries:
        """With those of earlier passes, the last `observed` ones of each sequence."""
        joined = [TokenBlock.joined(pair) for pair in zip(earlier.tokens, self.tokens, strict=True)]
        rows = _observed_rows([block for block, _ in joined], observed)
        own = upload(joined[rank][1][rows[rank]], self.packed.device)
        tokens = tuple(block.take(found) for (block, _), found in zip(joined, rows, strict=True))
        return Queries(tokens, torch.cat([earlier.packed, self.packed])[own])


def add_attention_mass(
    call: AttentionCall,
    queries: Queries,
    segments: Sequence[Segment],
    masses: Sequence[Tensor],
    peak: bool,
    near: int = 0,
) -> None:
    """Count in the attention that queries give to each token: its sum, or peak, over them and the heads of a KV group.

    The masses, per segment ``[K, n]``, are changed in place. Attention from a query to itself and the `near` tokens
    before it does not count; 0 counts everything.
    """
    for start in range(0, max(map(len, queries.tokens)), CHUNK_QUERIES):
        pieces = [np.arange(start, min(start + CHUNK_QUERIES, len(block))) for block in queries.tokens]
        own = queries.packed[start : start + CHUNK_QUERIES]
        # [N, most, H, D + 1]: every rank's, filled up to one length.
        padded = functional.pad(own, (0, 0, 0, 0, 0, max(map(len, pieces)) - len(own))).contiguous()
        gathered = call.comm.all_gather(padded, operation="compression", layer=call.layer)
        for rank, found in enumerate(gathered):
            tokens = queries.tokens[rank].take(pieces[rank])
            for segment, mass in zip(segments, masses, strict=True):
                run = tokens.run(segment.sequence)
                if run.stop > run.start and len(segment.slots):
                    with call.comm.ledger.compute("compression", call.layer):
                        _add_mass(mass, segment, found[run], tokens.slot[run], call.scoring, peak, near)


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


def _add_mass(
    mass_KS: Tensor, segment: Segment, queries: Tensor, q_slots: IntArray, scoring: Scoring, peak: bool, near: int
) -> None:
    """Count in the weights of ``[L, H, D + 1]`` queries, with their log-sum-exp, in tiles of keys."""
    kv_heads, count, _ = segment.k_KSD.shape
    # Counted in tokens: padding may lie between those of a turn.
    q_orders, orders = np.searchsorted(segment.all_slots, q_slots), segment.orders[segment.rank]
    scored = ScoredQueries(queries, q_slots, q_orders, kv_heads, scoring)
    tile = max(1, SCORE_ELEMENTS // (queries.shape[1] * len(q_slots)))
    for a in range(0, count, tile):
        keys = slice(a, min(a + tile, count))
        if segment.slots[a] > q_slots[-1]:
            break
        columns = (column[None, keys] for column in (segment.slots, segment.positions, orders))
        scored.add_to(mass_KS[:, keys], segment.k_KSD[:, keys], *columns, peak=peak, near=near)


def pooled(mass_KS: Tensor, radius: int, *, mean: bool) -> Tensor:
    """The maximum over neighbours within a radius, or the mean, to which those beyond the ends count as 0."""
    pool = functional.avg_pool1d if mean else functional.max_pool1d
    found: Tensor = pool(mass_KS, 2 * radius + 1, stride=1, padding=radius)
    return found


def pooled_mass(
    call: AttentionCall, masses: Sequence[Tensor], segments: Sequence[Segment], radius: int, *, mean: bool
) -> list[Tensor]:
    """What each token's neighbours were given, `pooled`; only those next to another rank's tokens travel."""
    # One segment behind the other, too far apart to be neighbours.
    starts = np.cumsum([0, *(segment.length + radius for segment in segments)])
    orders = [
        np.concatenate([segment.orders[rank] + start for segment, start in zip(segments, starts[:-1], strict=True)])
        for rank in range(call.size)
    ]
    mass, edges = torch.cat(list(masses), dim=1), _edges(orders, int(starts[-1]), radius)
    own, places = upload(orders[call.rank], mass.device), [upload(edge, mass.device) for edge in edges]
    # Where nothing is known of a token, it is no neighbour of this rank's.
    everyone = mass.new_zeros((len(mass), int(starts[-1])))
    everyone[:, own] = mass
    if most := max(map(len, edges)):
        sent = mass.new_zeros((len(mass), most))
        sent[:, : len(edges[call.rank])] = everyone[:, places[call.rank]]
        gathered = call.comm.all_gather(sent, operation="compression", layer=call.layer)
        for found, place in zip(gathered, places, strict=True):
            everyone[:, place] = found[:, : len(place)]
    return list(pooled(everyone, radius, mean=mean)[:, own].split([mass.shape[1] for mass in masses], dim=1))


def coarse_peaks(mass_KS: Tensor) -> Tensor:
    """Peaks without their last 7 bits, in float32."""
    # Many weights are almost exactly 1: which is the highest would depend on rounding, and so on the mesh.
    bits = mass_KS.float().contiguous().view(torch.int32)
    return ((bits + 64) & -128).view(torch.float32).to(mass_KS.dtype)


def _edges(orders: Sequence[IntArray], length: int, radius: int) -> list[IntArray]:
    """Per rank, the ordinals of its tokens that have a token of another rank within the radius."""
    owner = np.full(length, -1)
    for rank, order in enumerate(orders):
        owner[order] = rank
    near = np.zeros(length, dtype=bool)
    for distance in range(1, min(radius, length - 1) + 1):
        one, other = owner[:-distance], owner[distance:]
        foreign = (one != other) & (one >= 0) & (other >= 0)
        near[distance:] |= foreign
        near[:-distance] |= foreign
    return [order[near[order]] for order in orders]


@dataclass
class Observation:
    """What a layer has seen of a turn that goes on, on one rank.

    `queries` may yet belong to the window at the turn's end. `masses` has by sequence ``[K, n]`` what all queries so
    far have given to this rank's tokens of the turn.
    """

    queries: Queries | None = None
    masses: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Turn:
    """Slots, from `first` to before `stop`, that are compressed together; `seen` by layer."""

    first: int
    stop: int
    seen: dict[int, Observation] = field(default_factory=dict)
