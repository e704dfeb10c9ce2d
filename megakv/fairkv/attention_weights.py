"""The weights that queries give to keys, counted in by key: those of a turn, or those that each head still holds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megakv.attention.partial import Scoring
from megakv.base.device import upload
from megakv.distributed.sharding import IntArray

SCORE_ELEMENTS = 4 << 20
"""Attention weights held at a time (16 MiB in float32)."""


class ScoredQueries:
    """Queries ``[L, H, D + 1]``, with the log-sum-exp of their attention over all keys, at ascending slots ``[L]``.

    With it a rank has the true weights of its own keys and needs no other rank's. `orders` ``[L]`` are their indices
    among the sequence's tokens.
    """

    def __init__(self, packed: Tensor, slots: IntArray, orders: IntArray, kv_heads: int, scoring: Scoring):
        group = packed.shape[1] // kv_heads
        self._q = packed[..., :-1].transpose(0, 1).reshape(kv_heads, group * len(slots), -1) * scoring.scale
        self._lse = packed[..., -1].t().reshape(kv_heads, group * len(slots), 1)
        self._slots, self._orders, self._scoring = slots, orders, scoring
        self._shape = kv_heads, group, len(slots), -1

    def add_to(
        self,
        mass_KN: Tensor,
        k_KND: Tensor,
        slots: IntArray,
        positions: IntArray,
        orders: IntArray,
        *,
        peak: bool,
        near: int,
        counts: np.ndarray | None = None,
    ) -> None:
        """Count in what the queries and the heads of a KV group give to each key: the sum, or the peak.

        The columns are ``[K, n]``, or ``[1, n]`` where they are those of all heads. Attention from a query to itself
        and the `near` tokens before it does not count, nor does that to keys that `counts` leaves out.
        """
        scoring, at = self._scoring, self._slots[None, :, None]
        scores = torch.bmm(self._q, k_KND.to(self._q.dtype).transpose(1, 2))
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if scoring.alibi_slopes is not None:
            distance = upload(positions[:, None] - at, scores.device).to(scores)
            slopes = scoring.alibi_slopes.to(scores).view(*self._shape[:2], 1, 1)
            scores = scores + (slopes * distance[:, None]).reshape(scores.shape)
        weights = scores.sub_(self._lse).exp_().view(self._shape)
        unseen = self._unseen(slots, orders, near, counts)
        if unseen is not None:
            weights.masked_fill_(upload(unseen, weights.device)[:, None], 0.0)
        if peak:
            torch.maximum(mass_KN, weights.amax((1, 2)), out=mass_KN)
        else:
            mass_KN += weights.sum((1, 2))

    def _unseen(self, slots: IntArray, orders: IntArray, near: int, counts: np.ndarray | None) -> np.ndarray | None:
        """``[K, L, n]`` or ``[1, L, n]`` where a weight does not count; None where all do."""
        window, at = self._scoring.window, self._slots
        ahead, left = slots.max() > at[0], window is not None and slots.min() <= at[-1] - window
        close = near > 0 and orders.max() >= self._orders[0] - near
        if counts is None and not (ahead or left or close):
            return None
        seen = slots[:, None] <= at[None, :, None]
        if window is not None:
            seen &= slots[:, None] > at[None, :, None] - window
        if near:
            seen &= self._orders[None, :, None] - orders[:, None] > near
        unseen: np.ndarray = ~(seen if counts is None else seen & counts[:, None])
        return unseen
