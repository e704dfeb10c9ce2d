"""ALiBi biases as the model families compute them: from transformers' own functions, so that no slope differs."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as build_bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as build_falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor


def bloom_slopes(heads: int, device: torch.device) -> Tensor:
    """``[H]`` float32 slopes of BLOOM: added, per position, to the scaled scores."""
    mask = torch.ones(1, 2, dtype=torch.long, device=device)
    return build_bloom_alibi(mask, heads, torch.float32)[:, 0, 1]


def mpt_slopes(heads: int, device: torch.device) -> Tensor:
    """``[H]`` float32 slopes of MPT. Like transformers, it takes a maximal bias of 8 whatever `alibi_bias_max` says."""
    return -build_mpt_alibi_tensor(heads, 2, device=device)[:, 0, 0]


def falcon_slopes(heads: int, device: torch.device) -> Tensor:
    """``[H]`` bfloat16 slopes of Falcon: added, per position, to the scores before their scaling."""
    mask = torch.ones(1, 2, dtype=torch.long, device=device)
    return build_falcon_alibi(mask, heads, torch.bfloat16)[:, 0, 1]


def falcon_bias(slopes_H: Tensor, positions_S: Tensor, dtype: torch.dtype) -> Tensor:
    """``[H, S]`` biases of keys in a Falcon model, also a float32 one: products rounded to bfloat16.

    From position 256 on they grow in steps, so slopes alone cannot give them.
    """
    assert slopes_H.dtype == torch.bfloat16
    return (slopes_H[:, None] * positions_S).to(dtype)


def with_key_bias(q_BHSD: Tensor, k_BHSD: Tensor, bias_HS: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with one more column, through which each key's bias enters its products.

    Every attention kernel, the cache and the ring carry it without knowing.

    Parameters
    ----------
    q_BHSD, k_BHSD : Tensor
        ``[1, H, S, D]``: biases are per query head, so keys must not be shared.
    bias_HS : Tensor
        ``[H, S]``, added before the scaling, in the type of the keys.

    Returns
    -------
    tuple of Tensor
        Both ``[1, H, S, D + 1]``.
    """
    ones = q_BHSD.new_ones(q_BHSD.shape[:-1] + (1,))
    return torch.cat((q_BHSD, ones), dim=-1), torch.cat((k_BHSD, bias_HS[None, :, :, None]), dim=-1)
