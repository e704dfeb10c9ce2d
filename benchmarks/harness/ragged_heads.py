"""A rank's share of a synthetic ragged cache, and decode attention over it by MegaKV's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakv.fairkv.attention import paged_attention
from megakv.fairkv.pages import RaggedBody

from .head_division import Division, Piece

MOST_HEADS = 256
"""Heads of one `RaggedBody`."""


@dataclass(frozen=True)
class HeadShape:
    """The heads of a layer."""

    kv_heads: int  # KV heads, query heads that share one, and dimensions
    group: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Of a kept token: key and value of one head."""
        return 2 * self.dim * self.dtype.itemsize


MOST_OFFSETS = 1 << 16
"""Where in the row of random tokens a head's may begin."""


class TokenPool:
    """Random keys and values that every rank draws alike: a head's tokens are a stretch of one long row."""

    def __init__(self, shape: HeadShape, longest: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        self._offsets = min(4 * longest, MOST_OFFSETS)
        rows = torch.randn(longest + self._offsets, 2 * shape.dim, generator=generator)
        self._rows = rows.to(shape.device, shape.dtype)

    def tokens(self, layer: int, piece: Piece) -> Tensor:
        """``[n, 2D]`` keys and values of a piece, side by side; another head has other ones."""
        name = (layer * 1009 + piece.sequence) * 1013 + piece.head * 37
        offset = name % self._offsets
        return self._rows[offset + piece.start : offset + piece.stop]

    def queries(self, layer: int, batch: int) -> Tensor:
        """``[B, K, G, D]`` queries of a layer."""
        shape = self.shape
        generator = torch.Generator().manual_seed(layer + 1)
        queries = torch.randn(batch, shape.kv_heads, shape.group, shape.dim, generator=generator)
        return queries.to(shape.device, shape.dtype)


def ragged_body(
    pool: TokenPool, layer: int, pieces: Sequence[Piece], rows: Sequence[npt.NDArray[np.int64]]
) -> RaggedBody | None:
    """Pieces as if each were a head, with the rows of their tokens; None where they hold nothing."""
    counts = np.array([piece.stop - piece.start for piece in pieces])
    tokens = torch.cat([pool.tokens(layer, piece) for piece in pieces])
    return RaggedBody.packed(*tokens.split(pool.shape.dim, -1), counts, np.concatenate(rows))


class RankLayer:
    """What one rank holds of one layer: the pieces of all sequences in one ragged body, as if each were a head."""

    def __init__(self, pool: TokenPool, division: Division, layer: int, rank: int, batch: int):
        shape, split = pool.shape, set(division.divided(layer))
        pieces = sorted(division.pieces[layer][rank], key=lambda piece: piece.head in split)
        self.index = torch.tensor(
            [piece.sequence * shape.kv_heads + piece.head for piece in pieces], dtype=torch.long, device=shape.device
        )
        self.scale = shape.dim**-0.5
        queries = pool.queries(layer, batch).flatten(0, 1)[self.index]
        self._parts = []
        for start in range(0, len(pieces), MOST_HEADS):
            few = pieces[start : start + MOST_HEADS]
            body = ragged_body(pool, layer, few, [np.arange(piece.stop - piece.start) for piece in few])
            assert body is not None
            self._parts.append((queries[start : start + MOST_HEADS].flatten(0, 1)[:, None], body))
        self._group = shape.group
        self.shared = slice(sum(piece.head not in split for piece in pieces), None)
        """Which pieces are parts of a head that other ranks have parts of."""
        parts = [
            (p.sequence, p.head, r) for r, held in enumerate(division.pieces[layer]) for p in held if p.head in split
        ]
        mine = [[at for at, part in enumerate(parts) if part[:2] == (p.sequence, p.head)] for p in pieces[self.shared]]
        widest = max(map(len, mine), default=1)
        # The last row is that of no rank.
        table = [[*row, *[len(parts)] * (widest - len(row))] for row in mine]
        own = [row for row, part in enumerate(parts) if part[2] == rank]
        self._own = torch.tensor(own, dtype=torch.long, device=shape.device)
        self._all = torch.tensor(table, dtype=torch.long, device=shape.device).view(len(mine), widest)
        self._nobody = torch.zeros(len(parts) + 1, shape.group, device=shape.device)
        self._nobody[-1] = -torch.inf

    def attend(self) -> tuple[Tensor, Tensor]:
        """``[n, G, D]`` outputs and log-sum-exps ``[n, G]`` of the pieces."""
        outs, lses = zip(*(paged_attention(queries, body, self.scale) for queries, body in self._parts), strict=True)
        out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (outs, lses))
        return out.view(-1, self._group, out.shape[-1]), lse.view(-1, self._group)

    def weigh(self, out: Tensor, lse: Tensor, add_up: Callable[[Tensor], Tensor]) -> None:
        """Weigh the parts of shared heads, in place, so that those of all ranks add up to their attention."""
        own = lse[self.shared]
        everyone = self._nobody.clone()
        everyone[self._own] = own
        add_up(everyone[:-1])
        whole = everyone[self._all].logsumexp(1)
        out[self.shared] *= torch.exp(own - whole).unsqueeze(-1)


class Room:
    """Memory for one method's cache at a time: the next one's takes its place."""

    def __init__(self) -> None:
        self._guest: Any = None

    def take(self, guest: Any) -> None:
        """Let a method have its cache here: it is told to `build` it, and to `leave` before the next one."""
        if self._guest is not guest:
            self.clear()
            self._guest = guest
            guest.build()

    def clear(self) -> None:
        """Let nobody have one: what is measured next needs the memory."""
        if self._guest is not None:
            self._guest.leave()
            self._guest = None
