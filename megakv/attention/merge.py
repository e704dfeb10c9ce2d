"""Merging attention over disjoint key sets by log-sum-exp (context parallelism, Equation 4; online softmax)."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge the attention over a second, disjoint key set into the first, in place.

    `out` ``[..., D]`` and `lse` ``[...]`` are float32 or float64; `part_out` may be of any floating type. A part
    without visible keys is neutral (out 0, lse -inf) on either side.
    """
    # The sigmoid of the difference is exact at any gap and its two weights sum to one; -inf against -inf gives NaN,
    # where either weight would do because both outputs are zero. lerp_ is one pass without a temporary.
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def merge_parts(outs_NHLD: Tensor, lses_NHL: Tensor) -> tuple[Tensor, Tensor]:
    """Merge N stacked partial results in the order of their index, so that every rank gets the same bits.

    Returns ``[H, L, D]`` outputs and ``[H, L]`` log-sum-exps, float32, or float64 for float64 parts. A part that saw no
    key has a log-sum-exp of -inf.
    """
    dtype = torch.promote_types(lses_NHL.dtype, torch.float32)
    lses = lses_NHL.to(dtype)
    top = lses.amax(0)
    # Where no part saw a key, the maximum is -inf: shifting by 0 keeps the weights at 0 instead of NaN.
    top.masked_fill_(top == -torch.inf, 0.0)
    weights = torch.exp(lses - top)
    total = weights[0].clone()
    for weight in weights[1:]:
        total += weight
    weights /= total.masked_fill(total == 0, 1.0)
    out = outs_NHLD[0].to(dtype) * weights[0].unsqueeze(-1)
    for part, weight in zip(outs_NHLD[1:], weights[1:], strict=True):
        out.addcmul_(part.to(dtype), weight.unsqueeze(-1))
    return out, total.log_().add_(top)


def add_sinks(out_HLD: Tensor, lse_HL: Tensor, sinks: Tensor) -> Tensor:
    """Rescale merged outputs by an attention sink per head: a key that is always visible and has value zero."""
    return out_HLD * torch.sigmoid(lse_HL - sinks.to(lse_HL.dtype)[:, None]).unsqueeze(-1)
