"""Dense masked attention in float64: the obvious form that the fast ones are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megakv.attention.visibility import Slots, visible_pairs

if TYPE_CHECKING:
    from megakv.attention.partial import Scoring

__all__ = ["dense_attention", "reference_attention"]


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
    """Softmax attention and its log-sum-exp with the whole score matrix in memory.

    Returns
    -------
    tuple[Tensor, Tensor]
        Output ``[H, L, Dv]`` and log-sum-exp ``[H, L]``, float64; a row that sees no key has output 0 and -inf.
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


def reference_attention(
    q_HLD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    q_slots: Slots,
    k_slots: Slots,
    scoring: Scoring,
    k_positions: Slots | None = None,
) -> tuple[Tensor, Tensor]:
    """`megakv.attention.partial.attend` in its dense form, float64."""
    device = q_HLD.device
    visible = torch.from_numpy(visible_pairs(q_slots, k_slots, scoring.window)).to(device)
    bias = None
    if scoring.alibi_slopes is not None:
        positions = k_slots if k_positions is None else k_positions
        distance = torch.from_numpy(positions[None, :] - q_slots[:, None]).to(device)
        bias = scoring.alibi_slopes.double()[:, None, None] * distance
    return dense_attention(
        q_HLD, k_KSD, v_KSD, scoring.scale, visible_LS=visible, softcap=scoring.softcap, bias_HLS=bias
    )
