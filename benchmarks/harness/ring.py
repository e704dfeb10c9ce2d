"""The attention work of every rank of a pass-KV ring, done one rank after the other on one device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megakv.attention.partial import PartialAttention, Scoring
from megakv.attention.reference import dense_attention
from megakv.attention.visibility import visible_pairs
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import IntArray, new_tokens

from .timing import Watch

REFERENCE_KEYS = 4096
MATMUL_SECONDS = 0.2


@dataclass(frozen=True)
class Heads:
    """The attention heads on one rank."""

    queries: int  # Query heads and KV heads
    kv: int
    dim: int  # Head dimension
    dtype: torch.dtype

    def flops(self, slots: IntArray) -> int:
        """Operations of the queries at these slots: two products of `dim` for each visible key, masked ones none."""
        return 4 * self.queries * self.dim * int((slots + 1).sum())

    def memory_bytes(self, context: int, size: int) -> int:
        """Bytes of `VirtualRing` and the attention of one rank: inputs twice, a partial and two float32 outputs."""
        inputs = context * (self.queries + 2 * self.kv) * self.dim * self.dtype.itemsize
        outputs = -(-context // size) * self.queries * self.dim * (self.dtype.itemsize + 8)
        return 2 * inputs + outputs


class TimedAttention(PartialAttention):
    """Partial attention that knows how long its merging takes: everything between kernels and running result."""

    def __init__(self, q_HLD: Tensor, slots: IntArray, scoring: Scoring, merging: Watch):
        super().__init__(q_HLD, slots, scoring)
        self._merging = merging

    def _merge_rows(self, q0: int, q1: int, out: Tensor, lse: Tensor) -> None:
        with self._merging.span():
            super()._merge_rows(q0, q1, out, lse)


class VirtualRing:
    """Random queries, keys and values of one prompt, sharded as for a prefill of `size` ranks."""

    def __init__(self, context: int, size: int, heads: Heads, device: torch.device):
        self.context, self.size, self.heads, self.device = context, size, heads, device
        positions = np.arange(context)[None]
        layout = balanced(new_tokens(np.ones((1, context), dtype=bool), positions, 0), size)
        self.slots = [tokens.slot for tokens in layout.tokens]
        self.scoring = Scoring(heads.dim**-0.5)
        torch.manual_seed(0)

        def normal(count: int) -> Tensor:
            return torch.randn(context, count, heads.dim, device=device, dtype=heads.dtype)

        # Rows are tokens, as projections write them.
        self._q_CHD, self._k_CKD, self._v_CKD = normal(heads.queries), normal(heads.kv), normal(heads.kv)
        # A message holds whole heads one after the other.
        self._parts = [
            tuple(whole[self._index(rank)].transpose(0, 1).contiguous() for whole in (self._k_CKD, self._v_CKD))
            for rank in range(size)
        ]

    def _index(self, rank: int) -> Tensor:
        return torch.from_numpy(self.slots[rank]).to(self.device)

    def queries(self, rank: int) -> Tensor:
        """``[H, L, D]`` queries of a rank."""
        return self._q_CHD[self._index(rank)].transpose(0, 1)

    def attend(self, rank: int, q_HLD: Tensor, merging: Watch) -> PartialAttention:
        """Compute as a rank of the ring: its own part first, then the others in the order in which they arrive."""
        attention = TimedAttention(q_HLD, self.slots[rank], self.scoring, merging)
        for step in range(self.size):
            source = (rank - step) % self.size
            attention.add(*self._parts[source], self.slots[source])
        return attention

    def errors(self, rank: int, attention: PartialAttention, rows: IntArray) -> tuple[float, float]:
        """How far some of a rank's rows are from the full computation in float64."""
        slots = self.slots[rank][rows]
        index = torch.from_numpy(rows).to(self.device)
        out, lse = self.reference(slots)
        found = attention.out[:, index].double()
        relative = (found - out).norm(dim=-1) / out.norm(dim=-1)
        return float(relative.max()), float((attention.lse[:, index].double() - lse).abs().max())

    def reference(self, slots: IntArray) -> tuple[Tensor, Tensor]:
        """Outputs ``[H, n, D]`` and log-sum-exps ``[H, n]`` of the queries at these slots over all their keys."""
        q = self._q_CHD[torch.from_numpy(slots).to(self.device)].transpose(0, 1)
        outs, lses = [], []
        for start in range(0, int(slots.max()) + 1, REFERENCE_KEYS):
            keys = np.arange(start, min(start + REFERENCE_KEYS, self.context))
            visible = torch.from_numpy(visible_pairs(slots, keys)).to(self.device)
            k, v = (whole[start : start + len(keys)].transpose(0, 1) for whole in (self._k_CKD, self._v_CKD))
            out, lse = dense_attention(q, k, v, self.scoring.scale, visible_LS=visible)
            outs.append(out)
            lses.append(lse)
        total = torch.logsumexp(torch.stack(lses), 0)
        weights = (torch.exp(lse - total).unsqueeze(-1) for lse in lses)
        return sum((w * out for w, out in zip(weights, outs, strict=True)), torch.zeros_like(outs[0])), total


def matmul_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a large square matrix product: the median of as many as fit in a fifth of a second."""
    torch.manual_seed(1)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    watch = Watch(device)
    seconds: list[float] = []
    while len(seconds) < 4 or sum(seconds) < MATMUL_SECONDS:
        with watch.span():
            torch.mm(a, b)
        seconds.append(watch.seconds())
    return 2 * size**3 / float(np.median(seconds[1:]))
