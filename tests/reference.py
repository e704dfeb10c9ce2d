"""What partial attention must come to, in the dense form."""

import torch
from torch import Tensor

from megakv.attention.reference import Scoring, dense_attention
from megakv.attention.visibility import Slots, visible_pairs


def reference_attention(
    q_HLD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    q_slots: Slots,
    k_slots: Slots,
    scoring: Scoring,
    k_positions: Slots | None = None,
) -> tuple[Tensor, Tensor]:
    """What `megakv.attention.partial.PartialAttention` gives for one part, in its dense form, float64."""
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
