"""What attention is: the scores of a layer, and the obvious dense form in float64 that fast ones are compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megakv.attention.latent import LatentHeads


@dataclass(frozen=True)
class Scoring:
    """How a layer turns q.k into weights."""

    scale: float
    """Factor of the dot products."""
    window: int | None = None
    """A query at slot s sees the keys at slots in ``(s - window, s]``; None: all up to s."""
    softcap: float | None = None
    """c turns a scaled score s into ``c * tanh(s / c)``."""
    alibi_slopes: Tensor | None = None
    """``[H]`` float32. The bias ``slope_h * (k_position - q_slot)`` is added to the scaled scores. Against the usual
    ``slope_h * k_position`` it shifts a row's scores and log-sum-exp by a constant, which changes no weight: far into a
    long prompt, float32 would lose the bias of neighbouring keys otherwise."""
    latent: LatentHeads | None = None
    """The keys given are latents, to be expanded."""
    value_columns: int | None = None
    """So many first columns of the keys are the values, and those given have none; None: the values are those given."""

    @property
    def plain(self) -> bool:
        """Whether a score is the scaled product of query and key, and nothing else."""
        return self.softcap is None and self.alibi_slopes is None and self.latent is None

    def values(self, k_KSD: Tensor, v_KSD: Tensor) -> Tensor:
        """``[K, S, Dv]``, wherever they are."""
        return v_KSD if self.value_columns is None else k_KSD[..., : self.value_columns]

    def value_dim(self, v_KSD: Tensor) -> int:
        """Columns of an output, with values as they are given."""
        return v_KSD.shape[-1] if self.latent is None else self.latent.value_dim

    def of(self, heads: slice) -> Scoring:
        """Of some query heads."""
        return self if self.alibi_slopes is None else replace(self, alibi_slopes=self.alibi_slopes[heads])

    def absorbed(self) -> Scoring:
        """For queries that `LatentHeads.absorb` has made."""
        assert self.latent is not None
        return replace(self, latent=None, value_columns=self.latent.rank)


class Alibi(NamedTuple):
    """Linear position bias ``slopes_H[h] * (k_positions_S[j] - q_slots_L[i])``, added to the scaled scores."""

    slopes_H: Tensor
    q_slots_L: Tensor
    k_positions_S: Tensor


def dense_attention(
    q_HLD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    scale: float,
    *,
    visible_LS: Tensor | None = None,
    softcap: float | None = None,
    bias_HLS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention ``[H, L, D]`` and its log-sum-exp ``[H, L]``, float64, with the whole score matrix in memory.

    A row that sees no key has output 0 and log-sum-exp -inf.
    """
    group = q_HLD.shape[0] // k_KSD.shape[0]
    k = k_KSD.double().repeat_interleave(group, 0)
    v = v_KSD.double().repeat_interleave(group, 0)
    scores = q_HLD.double() @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias_HLS is not None:
        scores = scores + bias_HLS.double()
    if visible_LS is not None:
        scores = scores.masked_fill(~visible_LS, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
    return weights @ v, lse


def difference(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> str:
    """What differs by more than the tolerance, relative to 1 + the expected size; empty if nothing does."""
    for name, got, want in zip(("output", "log-sum-exp"), actual, expected, strict=True):
        if got.shape != want.shape:
            return f"its {name} has the shape {list(got.shape)} instead of {list(want.shape)}"
        if not torch.allclose(got.double(), want, rtol=tolerance, atol=tolerance):
            return f"its {name} differs from the reference by more than {tolerance}"
    return ""
