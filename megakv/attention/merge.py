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


def merge_by_owner(out_PRD: Tensor, lse_PR: Tensor, owners_P: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Merge P partial results over disjoint keys, each of the owner that it names.

    Returns ``[count, R, D]`` and ``[count, R]`` in the log-sum-exps' type; 0 and -inf for an owner without a part.
    """
    top = lse_PR.new_full((count, lse_PR.shape[1]), -torch.inf)
    top.scatter_reduce_(0, owners_P[:, None].expand_as(lse_PR), lse_PR, "amax")
    # An owner whose parts saw no key is shifted by 0: its sum stays 0 instead of NaN.
    shift = top.masked_fill_(top == -torch.inf, 0.0)
    weights = torch.exp(lse_PR - shift[owners_P])
    total = torch.zeros_like(shift).index_add_(0, owners_P, weights)
    out = lse_PR.new_zeros((count, *out_PRD.shape[1:])).index_add_(0, owners_P, out_PRD * weights.unsqueeze(-1))
    return out.div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1)), total.log_().add_(shift)


def add_sinks(out_HLD: Tensor, lse_HL: Tensor, sinks: Tensor) -> Tensor:
    """Rescale merged outputs by an attention sink per head: a key that is always visible and has value zero."""
    return out_HLD * torch.sigmoid(lse_HL - sinks.to(lse_HL.dtype)[:, None]).unsqueeze(-1)
