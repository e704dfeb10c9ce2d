"""A rank's share of a synthetic ragged cache, and decode attention over it by MegaKV's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakv.attention.partial import PartialAttention
from megakv.attention.reference import Scoring
from megakv.cache.ragged_attention import RaggedPart
from megakv.cache.ragged_body import RaggedBody

from .division import Division, Piece


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


MOST_OFFSETS = 1 << 16  # Where in the row of random tokens a head's may begin


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
        shape = pool.shape
        places = [[p.sequence * shape.kv_heads + p.head for p in held] for held in division.pieces[layer]]
        pieces = division.pieces[layer][rank]
        self.index = torch.tensor(places[rank], dtype=torch.long, device=shape.device)
        self._scoring = Scoring(shape.dim**-0.5)
        queries = pool.queries(layer, batch).flatten(0, 1)[self.index]
        body = ragged_body(pool, layer, pieces, [np.arange(piece.stop - piece.start) for piece in pieces])
        assert body is not None
        slots = np.arange(body.index.last_row + 1)
        self._part, self._slot = RaggedPart(0, body, slots, slots), slots[-1:] + 1
        self._queries = queries.flatten(0, 1)[:, None]
        self._group, self._rank = shape.group, rank
        # ``[ranks, B K, 1]`` who has no part of which head.
        without = torch.ones(len(places), batch * shape.kv_heads, 1, dtype=torch.bool)
        for other, held in enumerate(places):
            without[other, held] = False
        self._without = without.to(shape.device)

    def attend(self) -> tuple[Tensor, Tensor]:
        """``[n, G, D]`` outputs and log-sum-exps ``[n, G]`` of the pieces."""
        partial = PartialAttention(self._queries, self._slot, self._scoring)
        self._part.add_to(partial)
        return partial.out.view(-1, self._group, partial.value_dim), partial.lse.view(-1, self._group)

    def weigh(self, out: Tensor, lse: Tensor, add_up: Callable[[Tensor], Tensor]) -> None:
        """Weigh the parts of shared heads, in place, so that those of all ranks add up to their attention."""
        everyone = lse.new_zeros(*self._without.shape[:2], self._group)
        everyone[self._rank, self.index] = lse
        add_up(everyone)
        whole = everyone.masked_fill_(self._without, -torch.inf).logsumexp(0)
        out *= torch.exp(lse - whole[self.index]).unsqueeze(-1)


class Room:
    """Memory for one method's cache at a time: the next one's takes its place."""

    guest: Any = None

    def take(self, guest: Any) -> None:
        """Let a method `build` its cache here, when the one before was told to `leave`; None: nobody has one."""
        if self.guest is not guest:
            if self.guest is not None:
                self.guest.leave()
            self.guest = guest
            if guest is not None:
                guest.build()
