"""What of a layer the host attends to: the tokens that its plan has left where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.attention.partial import Part
from megakv.distributed.sharding import TokenBlock, TokenTable
from megakv.offload.host_rank import HostPart, HostParts, HostRank, HostRows, Queries
from megakv.offload.store import Strip


def attend_on_host(
    host: HostRank,
    call: AttentionCall,
    table: TokenTable,
    q_HLD: Tensor,
    tokens: TokenBlock,
    strips: Sequence[Strip],
    left: Sequence[Part],
) -> HostParts | None:
    """Begin to attend to what was left to the host of a layer's strips, and to `left`, parts of all heads, as of
    `HostRank.start`; None where all is on the accelerator.
    """
    staged, latent = strips[0].store.staged, call.scoring.latent
    if latent is not None:
        # It has no weights to expand them with.
        own, q_HLD = latent.absorb(call.q_HLD[:, :0]), latent.absorb(q_HLD)
        call = replace(call, q_HLD=own, scoring=call.scoring.absorbed())
    group = len(q_HLD) // call.kv_heads
    if host.queries is None:
        # It is given what its queries see.
        host.queries = Queries(group, call.q_HLD.shape[2], replace(call.scoring, window=None))
    if staged is None or not staged.host_attends:
        return None
    found: list[HostPart] = []
    if left and len(strips) > 1:
        # All heads have them, and their rows are not in one tier.
        found.append(host.start(call, q_HLD, tokens, strips[0].store, HostRows([], [], []), left))
        left = []
    for strip in strips:
        rows = _rows(strip, table, call.rank)
        if any(rows.runs) or left:
            heads = None if strip.heads is None else slice(group * strip.heads.start, group * strip.heads.stop)
            found.append(host.start(call, q_HLD, tokens, strip.store, rows, left, heads))
    staged.host_parts += found
    return HostParts(found, latent)


def _rows(strip: Strip, table: TokenTable, rank: int) -> HostRows:
    """The rows of a strip that were left on the host."""
    store, staged = strip.store, strip.store.staged
    if staged is None or not store.head_shape.heads:
        return HostRows([], [], [])
    if staged.on_host is None:
        # What was brought ahead may have been counted before the latest rows were left behind.
        firsts = [max(first, store.gone(row)) for row, first in enumerate(staged.out_of_window)]
        spans = enumerate(zip(firsts, staged.away, strict=True))
        staged.on_host = [store.rows_in_memory(row, end, min(first, end)) for row, (first, end) in spans]
    slots, positions = (
        [strip.numbers(sequence, column(rank, sequence)) for sequence in store.sequences]
        for column in (table.slots, table.positions)
    )
    return HostRows(staged.on_host, slots, positions)
