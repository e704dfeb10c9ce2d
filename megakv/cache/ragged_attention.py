"""Attention to ragged heads: no head is padded to another's length, and time goes with the tokens that were kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from megakv.attention.compiled import Packing, RowTable, load_kernel
from megakv.attention.partial import PartialAttention
from megakv.attention.reference import Scoring
from megakv.attention.varlen import select_varlen
from megakv.base.library import TYPES
from megakv.cache.ragged_body import BodyIndex, RaggedBody
from megakv.distributed.sharding import IntArray

FEW_ROWS = 64
"""Up to this many query rows per KV head, all heads are one kernel call on CUDA: a tile of the kernel has as many."""


class AttendedBody(Protocol):
    """Tokens on one device, or what the compiled kernel unpacks to them; `here` gives themselves."""

    @property
    def index(self) -> BodyIndex: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def packing(self) -> Packing | None: ...
    @property
    def runs(self) -> RowTable: ...
    def here(self) -> RaggedBody: ...


@dataclass(frozen=True)
class RaggedPart:
    """Kept tokens of one sequence on one rank, as attention methods take them (see `megakv.attention.partial.Part`).

    The body's rows index `slots` and `positions`, those of all this rank's tokens of the sequence.
    """

    sequence: int
    body: AttendedBody
    slots: IntArray
    positions: IntArray
    moved: tuple[int, int] = (0, 0)
    """So many positions further on count the tokens before a row: keys that have such in them were rotated."""

    def seen(self, first: int, last: int, window: int | None) -> bool:
        """Whether all of it is, by queries from a first slot to a last one."""
        index = self.body.index
        seen = self.slots[index.last_row] <= first
        return bool(seen and (window is None or self.slots[index.first_row] > last - window))

    def runs(self, q_HLD: Tensor, slot: int, scoring: Scoring) -> IntArray | None:
        """See `Part`: a run for each head."""
        body = self.body
        reads = isinstance(body, RaggedBody) and body.dtype == q_HLD.dtype and body.key_dim == q_HLD.shape[2]
        return body.here().table if reads and self.seen(slot, slot, scoring.window) else None

    def add_to(self, partial: PartialAttention) -> None:
        """Attend to all heads' tokens and merge."""
        if not len(partial.q_slots):
            return
        q_HLD, scoring = partial.q_HLD, partial.scoring
        index = self.body.index
        found = None
        if scoring.plain and self.seen(int(partial.q_slots[0]), int(partial.q_slots[-1]), scoring.window):
            found = attend_whole(q_HLD, self.body, scoring.scale, scoring.value_columns)
        if found is not None:
            partial.merge(*found)
        else:
            body, (shift, before) = self.body.here(), self.moved

            def add(head: int, part: PartialAttention) -> None:
                for keys, values, rows in body.pieces(head):
                    part.add(keys, values, self.slots[rows], self.positions[rows] + shift * (rows < before))

            attend_by_heads(partial, range(len(index.counts) + 1), add)


def attend_by_heads(
    partial: PartialAttention, bounds: Sequence[int], add: Callable[[int, PartialAttention], None]
) -> None:
    """Let runs of KV heads attend one behind the other to what `add` adds to each, and merge.

    A run lies between two neighbours of the ascending `bounds`, from 0 to all KV heads.
    """
    group, outs, lses = partial.q_HLD.shape[0] // bounds[-1], [], []
    for index, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        own = slice(first * group, last * group)
        part = PartialAttention(partial.q_HLD[own], partial.q_slots, partial.scoring.of(own), partial.value_dim)
        add(index, part)
        outs.append(part.out)
        lses.append(part.lse)
    partial.merge(torch.cat(outs), torch.cat(lses))


def attend_whole(
    q_HLD: Tensor, body: AttendedBody, scale: float, value_dim: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """Few queries ``[H, L, D]`` against every kept token of their head, whose values may be columns of its keys.

    All heads are one call of a kernel. Returns ``[H, L, Dv]`` and the log-sum-exp ``[H, L]``, float32, 0 and -inf for a
    head without tokens; None where there is no such kernel.
    """
    heads, length, dim = q_HLD.shape
    kv_heads = len(body.index.counts)
    grouped = q_HLD.reshape(kv_heads, -1, dim)
    if q_HLD.device.type == "cpu":
        kernel, _ = load_kernel()
        # The kernel reads addresses: what does not fit together, as from a session's broken file, must not come to it.
        fits = q_HLD.dtype == body.dtype and q_HLD.dtype in TYPES and body.key_dim == dim
        # Of packed tokens it takes keys and values that lie behind one another.
        fits = fits and (body.packing is None or value_dim is None)
        if kernel is None or not fits or not kernel.few(heads // kv_heads, length):
            return None
        columns = body.value_dim if value_dim is None else value_dim
        out, lse = kernel.ready(grouped[:, None], body.runs, 1, columns, scale, body.packing)()
    else:
        here = body.here()
        values = here.v_nD if value_dim is None else here.k_nD[:, :value_dim]
        varlen = select_varlen(grouped, here.k_nD, values)
        if varlen is None or grouped.shape[1] > FEW_ROWS:
            return None
        out, lse = varlen(grouped, here.k_nD, values, here.key_runs, scale)
    return out.reshape(heads, length, -1), lse.reshape(heads, length)
