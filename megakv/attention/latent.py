"""Latent attention (MLA; DeepSeek-V2, Section 2.1): all heads of a token see one latent, and nothing else is cached.

A cached row is a token's latent of R numbers, after its norm, and one rotated key of P that all heads share; of values
it has no columns. There are two ways to attend to rows, with equal results:

- absorbed: queries go through W_UK into the latent's space. All heads then share one KV head, whose keys are the rows
  and whose values are their first R columns; outputs come back through W_UV. A pair of a query and a key costs
  2 R + P products in each head.
- expanded: rows become each head's own keys of N + P and values of V numbers, for R (N + V) products a row and head;
  then a pair costs N + P + V. That is less where many queries see the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

EXPANDED_ROWS = 2048
"""Rows that are expanded at a time: all heads' keys and values are as large as the cache of a model without latents."""


@dataclass(frozen=True, eq=False)
class LatentHeads:
    """Some heads of a layer: `weight` ``[H * (N + V), R]`` makes their keys, but for the rotated part, and values."""

    weight: Tensor
    heads: int
    key_dim: int
    """N: of a head's keys that are not rotated."""

    @property
    def rank(self) -> int:
        """R: columns of a latent."""
        return self.weight.shape[1]

    @property
    def value_dim(self) -> int:
        """V: columns of a head's values."""
        return self.weight.shape[0] // self.heads - self.key_dim

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """W_UK ``[H, N, R]`` and W_UV ``[H, V, R]``."""
        by_head = self.weight.view(self.heads, -1, self.rank)
        return by_head[:, : self.key_dim], by_head[:, self.key_dim :]

    def absorb(self, q_HLD: Tensor) -> Tensor:
        """Queries ``[H, L, N + P]`` as ``[H, L, R + P]``, whose products with rows are those with expanded keys."""
        return torch.cat((torch.bmm(q_HLD[..., : self.key_dim], self._parts[0]), q_HLD[..., self.key_dim :]), dim=-1)

    def lift(self, out_HLR: Tensor) -> Tensor:
        """Outputs over latents ``[H, L, R]`` as those over values ``[H, L, V]``, in the same type."""
        # In this order: on processors the other one is four times as slow in 16 bits.
        return torch.bmm(self._parts[1].to(out_HLR.dtype), out_HLR.transpose(1, 2)).transpose(1, 2)

    def expand(self, rows_KSD: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ``[1, S, R + P]`` as keys ``[H, S, N + P]`` and values ``[H, S, V]``."""
        latents, rotated = rows_KSD[0].split((self.rank, rows_KSD.shape[2] - self.rank), dim=-1)
        both = F.linear(latents, self.weight).view(len(latents), self.heads, -1).transpose(0, 1)
        keys = both.new_empty((*both.shape[:2], self.key_dim + rotated.shape[1]))
        keys[..., : self.key_dim] = both[..., : self.key_dim]
        keys[..., self.key_dim :] = rotated
        return keys, both[..., self.key_dim :]


def expanding_pays(
    rank: int, key_dim: int, value_dim: int, new: Sequence[int], cached: Sequence[int], ranks: int
) -> bool:
    """Whether expanded attention takes fewer products: heads of `LatentHeads`, new and cached tokens by sequence.

    Spread over `ranks`, each of which sees all rows, and some of the queries.
    """
    queries = sum(new)
    rows = queries + sum(cached)
    pairs = sum(count * (held + count / 2) for count, held in zip(new, cached, strict=True))
    saved = (2 * rank - key_dim - value_dim) * pairs
    return saved > rank * (key_dim + value_dim) * (ranks * rows - queries)
