"""Attention to ragged heads: no head is padded to another's length, and time goes with the tokens that were kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from megakv.attention.backends import attend_block
from megakv.attention.compiled import TYPES, load_kernel
from megakv.attention.partial import PartialAttention
from megakv.distributed.sharding import IntArray
from megakv.fairkv.pages import RaggedBody

PAGED_ROWS = 64
"""Up to this many query rows per KV head, all pages of one size are one kernel call; every page repeats its rows."""


@dataclass(frozen=True)
class RaggedPart:
    """Kept tokens of one sequence on one rank, as attention methods take them (see `megakv.attention.partial.Part`).

    The body's rows index `slots` and `positions`, those of all this rank's tokens of the sequence.
    """

    sequence: int
    body: RaggedBody
    slots: IntArray
    positions: IntArray
    moved: tuple[int, int] = (0, 0)
    """So many positions further on count the tokens before a row: keys that have such in them were rotated."""

    def add_to(self, partial: PartialAttention) -> None:
        """Attend to all heads' tokens and merge."""
        if not len(partial.q_slots):
            return
        q_HLD, scoring = partial.q_HLD, partial.scoring
        rows = q_HLD.shape[0] // len(self.body.counts) * q_HLD.shape[1]
        index = self.body.index
        seen = self.slots[index.last_row] <= partial.q_slots[0]
        if scoring.window is not None:
            seen = seen and self.slots[index.first_row] > partial.q_slots[-1] - scoring.window
        if seen and rows <= PAGED_ROWS and scoring.alibi_slopes is None:
            value_dim = scoring.value_columns
            found = paged_attention(q_HLD, self.body, scoring.scale, softcap=scoring.softcap, value_dim=value_dim)
            partial.merge(*found)
        else:
            # For many queries, and where slots or positions matter.
            attend_by_heads(partial, range(len(self.body.counts) + 1), self._add)

    def _add(self, head: int, part: PartialAttention) -> None:
        shift, before = self.moved
        for keys, values, rows in self.body.pieces(head):
            part.add(keys, values, self.slots[rows], self.positions[rows] + shift * (rows < before))


def attend_by_heads(
    partial: PartialAttention, bounds: Sequence[int], add: Callable[[int, PartialAttention], None]
) -> None:
    """Let runs of KV heads attend one behind the other to what `add` adds to each, and merge.

    A run lies between two neighbours of the ascending `bounds`, from 0 to all KV heads.
    """
    group, outs, lses = partial.q_HLD.shape[0] // bounds[-1], [], []
    slopes = partial.scoring.alibi_slopes
    for index, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        own = slice(first * group, last * group)
        scoring = replace(partial.scoring, alibi_slopes=None if slopes is None else slopes[own])
        part = PartialAttention(partial.q_HLD[own], partial.q_slots, scoring, partial.value_dim)
        add(index, part)
        outs.append(part.out)
        lses.append(part.lse)
    partial.merge(torch.cat(outs), torch.cat(lses))


def paged_attention(
    q_HLD: Tensor, body: RaggedBody, scale: float, *, softcap: float | None = None, value_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """Few queries ``[H, L, D]`` against every kept token of their head, whose values may be columns of its keys.

    On a processor all pages go through the compiled kernel at once. Elsewhere, and without that kernel, all pages of a
    size go through the kernel of dense attention as if each were a KV head; their results are merged by log-sum-exp.

    Returns ``[H, L, Dv]`` and the log-sum-exp ``[H, L]``, float32 (float64 for float64); 0 and -inf for a head without
    tokens.
    """
    heads, length, dim = q_HLD.shape
    kv_heads = len(body.counts)
    grouped = q_HLD.reshape(kv_heads, -1, dim)
    # The kernel reads addresses: what does not fit together, as from a session's broken file, must not come to it.
    fits = q_HLD.dtype == body.block.dtype and q_HLD.dtype in TYPES and body.key_dim == dim
    kernel = load_kernel()[0] if q_HLD.device.type == "cpu" and softcap is None and fits else None
    if kernel is not None and kernel.few(heads // kv_heads, length):
        out, lse = kernel.ready(grouped[:, None], body.runs, 1, value_dim or body.value_dim, scale)()
        return out.view(heads, length, -1), lse.view(heads, length)
    outs, lses, owners = [], [], []
    for pages in body.pages:
        values = pages.v_PSD if value_dim is None else pages.k_PSD[..., :value_dim]
        out, lse = attend_block(grouped.index_select(0, pages.heads_P), pages.k_PSD, values, scale, softcap=softcap)
        outs.append(out.to(lse.dtype))
        lses.append(lse)
        owners.append(pages.heads_P)
    out, lse = merge_by_owner(outs, lses, owners, kv_heads)
    return out.reshape(heads, length, -1), lse.reshape(heads, length)


def merge_by_owner(
    outs: Sequence[Tensor], lses: Sequence[Tensor], owners: Sequence[Tensor], kv_heads: int
) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint keys that belong to the same head.

    Outputs ``[P, R, Dv]``, which are used up, log-sum-exps ``[P, R]`` and heads ``[P]`` of each come in several lots.
    Returns ``[K, R, Dv]`` and ``[K, R]``; 0 and -inf for a head without a part.
    """
    lses_PR, owners_P = torch.cat(list(lses)), torch.cat(list(owners))
    top = lses_PR.new_full((kv_heads, lses_PR.shape[1]), -torch.inf)
    top.scatter_reduce_(0, owners_P[:, None].expand_as(lses_PR), lses_PR, "amax")
    # A head without a part is shifted by 0: its sum stays 0 instead of NaN.
    shift = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(lses_PR - shift[owners_P])
    total = torch.zeros_like(top).index_add_(0, owners_P, weights)
    out = outs[0].new_zeros((kv_heads, *outs[0].shape[1:]))
    # In place and piece by piece: outputs are large beside pages, and each copy costs several percent of the time.
    for part, owner, weight in zip(outs, owners, weights.split([len(piece) for piece in owners]), strict=True):
        out.index_add_(0, owner, part.mul_(weight.unsqueeze(-1)))
    return out.div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1)), total.log() + shift
