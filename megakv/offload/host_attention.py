"""What of a layer the host attends to: the tokens that its plan has left where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.attention.partial import Part
from megakv.distributed.sharding import TokenBlock, TokenTable
from megakv.offload.host_rank import HostPart, HostRank, LiftedPart, Queries
from megakv.offload.store import TieredStore


def attend_on_host(
    host: HostRank,
    call: AttentionCall,
    table: TokenTable,
    q_HLD: Tensor,
    tokens: TokenBlock,
    store: TieredStore,
    parts: Sequence[Part],
) -> HostPart | LiftedPart | None:
    """Begin to attend to what was left to the host, and to `parts`, as of `HostRank.start`; None for nothing."""
    staged, latent = store.staged, call.scoring.latent
    if latent is not None:
        # It has no weights to expand them with.
        own, q_HLD = latent.absorb(call.q_HLD[:, :0]), latent.absorb(q_HLD)
        call = replace(call, q_HLD=own, scoring=call.scoring.absorbed())
    if host.queries is None:
        # It is given what its queries see.
        host.queries = Queries(call.q_HLD.shape[0], call.q_HLD.shape[2], replace(call.scoring, window=None))
    if staged is None or not staged.host_attends:
        return None
    if staged.on_host is None:
        # What was brought ahead may have been counted before the latest rows were left behind.
        firsts = [max(first, store.gone(row)) for row, first in enumerate(staged.out_of_window)]
        spans = enumerate(zip(firsts, staged.away, strict=True))
        staged.on_host = [store.rows_in_memory(row, end, min(first, end)) for row, (first, end) in spans]
    part = host.start(call, table, q_HLD, tokens, store, staged.on_host, parts)
    staged.host_parts.append(part)
    return part if latent is None else LiftedPart(part, latent, (*q_HLD.shape[:2], latent.rank))
