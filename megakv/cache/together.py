"""One query row of each of several sequences whose KV heads keep tokens of their own, on CUDA.

One variable-length call takes all bodies that lie in one memory, and a second one the few tokens behind them, which are
brought together for it. On processors it is `megakv.attention.together`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megakv.attention.merge import merge_, merge_by_owner
from megakv.attention.partial import KVPart, Part
from megakv.attention.reference import Scoring
from megakv.attention.varlen import KeyRuns, VarlenKernel, select_varlen
from megakv.attention.visibility import sees_all
from megakv.base.device import upload
from megakv.cache.joined_bodies import rows_of, stretches
from megakv.cache.ragged_attention import FEW_ROWS, RaggedPart
from megakv.cache.ragged_body import RaggedBody
from megakv.distributed.sharding import TokenBlock

TAIL_ROWS = 8192
"""Tokens behind bodies, of all sequences, up to which they are copied to where one call takes them; of more, each
sequence's are attended to where they lie."""


class _Held(NamedTuple):
    """What the query rows see: by row, in their order."""

    bodies: list[tuple[int, RaggedBody]]
    tails: list[tuple[int, KVPart]]


def attend_heads(
    q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, parts: Sequence[Part]
) -> tuple[Tensor, Tensor, list[Part]] | None:
    """``[H, L, Dv]`` float32 outputs, ``[H, L]`` log-sum-exps, and the parts that are not in them.

    None without bodies that a kernel takes.
    """
    if not scoring.plain:
        return None
    rows = {sequence: row for row, sequence in enumerate(tokens.sequences)}
    held, rest = _Held([], []), list[Part]()
    for part in parts:
        row = rows.get(part.sequence)
        if row is None:
            continue
        slot = int(tokens.slot[row])
        if isinstance(part, RaggedPart) and part.seen(slot, slot, scoring.window) and _fits(q_HLD, part.body):
            held.bodies.append((row, part.body.here()))
        elif isinstance(part, KVPart) and _takes(q_HLD, part, slot, scoring):
            held.tails.append((row, part))
        else:
            rest.append(part)
    if not held.bodies:
        return None
    if sum(len(part.slots) for _, part in held.tails) > TAIL_ROWS:
        rest += [part for _, part in held.tails]
        held.tails.clear()
    found = _on_cuda(q_HLD, scoring, held)
    return None if found is None else (*found, rest)


def _fits(q_HLD: Tensor, body: object) -> bool:
    return (
        isinstance(body, RaggedBody)
        and body.dtype == q_HLD.dtype
        and body.key_dim == q_HLD.shape[2]
        and body.k_nD.device == q_HLD.device
    )


def _takes(q_HLD: Tensor, part: KVPart, slot: int, scoring: Scoring) -> bool:
    keys, count = part.k_KSD, len(part.slots)
    fits = keys.dtype == part.v_KSD.dtype == q_HLD.dtype and keys.shape[2] == q_HLD.shape[2]
    fits = fits and keys.stride(2) == 1 and (scoring.value_columns is not None or part.v_KSD.stride(2) == 1)
    return fits and count > 0 and sees_all(slot, part.slots, 0, count, scoring.window)


def _on_cuda(q_HLD: Tensor, scoring: Scoring, held: _Held) -> tuple[Tensor, Tensor] | None:
    heads, rows, dim = q_HLD.shape
    (_, first), *_ = held.bodies
    kv_heads = len(first.counts)
    # Heads that share a KV head go in as its rows.
    q_LKGD = q_HLD.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
    kernel = select_varlen(q_LKGD, first.k_nD, scoring.values(first.k_nD, first.v_nD))
    if kernel is None or q_LKGD.shape[2] > FEW_ROWS:
        return None
    found = []
    for begin, end in stretches([body for _, body in held.bodies]):
        own, bodies = zip(*held.bodies[begin:end], strict=True)
        k_nD, v_nD, runs = rows_of(bodies)
        out, lse = kernel(_rows(q_LKGD, own).flatten(0, 1), k_nD, scoring.values(k_nD, v_nD), runs, scoring.scale)
        found.append((own, out.reshape(len(own), heads, -1), lse.reshape(len(own), heads)))
    if held.tails:
        found.append(_tails(kernel, q_LKGD, scoring, held.tails))
    every = tuple(range(rows))
    if all(own == every for own, _, _ in found):
        (_, out, lse), *others = found
        for _, part_out, part_lse in others:
            merge_(out, lse, part_out, part_lse)
    else:
        owners = upload(np.concatenate([own for own, _, _ in found]), q_HLD.device)
        outs, lses = torch.cat([out for _, out, _ in found]), torch.cat([lse for _, _, lse in found])
        out, lse = merge_by_owner(outs, lses, owners, rows)
    return out.transpose(0, 1), lse.t()


def _tails(
    kernel: VarlenKernel, q_LKGD: Tensor, scoring: Scoring, tails: Sequence[tuple[int, KVPart]]
) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Rows, outputs ``[n, H, Dv]`` and log-sum-exps ``[n, H]`` of the tokens behind bodies: a run for each tail of each
    head.
    """
    own, parts = zip(*tails, strict=True)
    k_KTD, v_KTD = (torch.cat(each, dim=1) for each in zip(*(part[1:3] for part in parts), strict=True))
    kv_heads, values = len(k_KTD), scoring.values(k_KTD, v_KTD)
    runs = KeyRuns(np.tile([len(part.slots) for part in parts], kv_heads), k_KTD.device)
    q_KnGD = _rows(q_LKGD, own).transpose(0, 1)
    out, lse = kernel(q_KnGD.flatten(0, 1), k_KTD.flatten(0, 1), values.flatten(0, 1), runs, scoring.scale)
    by_head = (each.unflatten(0, (kv_heads, len(own))).transpose(0, 1) for each in (out, lse))
    out, lse = (each.flatten(1, 2) for each in by_head)
    return own, out, lse


def _rows(q_LKGD: Tensor, own: Sequence[int]) -> Tensor:
    if tuple(own) == tuple(range(len(q_LKGD))):
        return q_LKGD
    return q_LKGD.index_select(0, upload(np.array(own), q_LKGD.device))
