"""A rank's share of a synthetic ragged cache, and decode attention over it by MegaKV's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megakv.fairkv.attention import paged_attention
from megakv.fairkv.pages import RaggedBody

from .head_division import Division, Piece

MOST_HEADS = 256
"""Heads of one `RaggedBody`."""


@dataclass(frozen=True)
class HeadShape:
    """The heads of a layer.

    Parameters
    ----------
    kv_heads, group, dim : int
        KV heads, query heads that share one, and dimensions.
    dtype : torch.dtype
    device : torch.device
    """

    kv_heads: int
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
    """Random keys and values that every rank draws alike: a head's tokens are a stretch of one long row.

    Parameters
    ----------
    shape : HeadShape
    longest : int
        Tokens of the largest head.
    seed : int
    """

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


class RankLayer:
    """What one rank holds of one layer: the pieces of all sequences in one ragged body, as if each were a head.

    Parameters
    ----------
    pool : TokenPool
    division : Division
    layer, rank : int
    batch : int
    """

    def __init__(self, pool: TokenPool, division: Division, layer: int, rank: int, batch: int):
        shape = pool.shape
        pieces = division.pieces[layer][rank]
        self.index = torch.tensor(
            [piece.sequence * shape.kv_heads + piece.head for piece in pieces], dtype=torch.long, device=shape.device
        )
        self.scale = shape.dim**-0.5
        queries = pool.queries(layer, batch).flatten(0, 1)[self.index]
        self._parts = [
            (queries[start : start + MOST_HEADS].flatten(0, 1)[:, None], self._body(pool, layer, few))
            for start in range(0, len(pieces), MOST_HEADS)
            for few in [pieces[start : start + MOST_HEADS]]
        ]
        self._group = shape.group
        split = set(division.divided(layer))
        chosen = [number for number, piece in enumerate(pieces) if piece.head in split]
        self.split = torch.tensor(chosen, dtype=torch.long, device=shape.device)
        """Which pieces are parts of a head that other ranks have parts of."""

    @staticmethod
    def _body(pool: TokenPool, layer: int, pieces: Sequence[Piece]) -> RaggedBody:
        counts = np.array([piece.stop - piece.start for piece in pieces])
        tokens = torch.cat([pool.tokens(layer, piece) for piece in pieces])
        rows = np.concatenate([np.arange(count) for count in counts])
        body = RaggedBody.packed(*tokens.split(pool.shape.dim, -1), counts, rows)
        assert body is not None
        return body

    def attend(self) -> tuple[Tensor, Tensor]:
        """``[n, G, D]`` outputs and log-sum-exps ``[n, G]`` of the pieces."""
        outs, lses = zip(*(paged_attention(queries, body, self.scale) for queries, body in self._parts), strict=True)
        out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (outs, lses))
        return out.view(-1, self._group, out.shape[-1]), lse.view(-1, self._group)
