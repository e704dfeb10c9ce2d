"""Prompts of which nothing was cached, in one kernel call on CUDA: neither stores nor blocks have to be asked.

Python takes longer to do that, layer by layer and sequence by sequence, than a GPU takes for short prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megakv.attention.backends import CUDNN_OPERATIONS, Result, attend_block, trusted
from megakv.attention.reference import dense_attention
from megakv.attention.varlen import FLASH_DIM, MULTIPLE
from megakv.base.device import upload
from megakv.distributed.sharding import TokenBlock

Once = Callable[[Any, Callable[[], Any]], Any]
"""Makes what all layers of a pass share, by key."""


def attend_prompts(call: Any, q_HLD: Tensor, tokens: TokenBlock) -> tuple[Tensor, Tensor] | None:
    """Prompts of which nothing was cached, in one kernel call on CUDA; None for all else.

    Of each sequence, queries are those of all its tokens, or, in the last layer, of its last one.
    """
    scoring, new = call.scoring, call.layout.tokens[call.rank]
    plain = scoring.plain and scoring.value_columns is None
    if q_HLD.device.type == "cpu" or call.size > 1 or not call.in_hand or not plain:
        return None

    def fresh() -> bool:
        lengths = np.diff(new.bounds)
        longest, last = int(lengths.max(initial=0)), new.bounds[1:][lengths > 0] - 1
        alone = not call.compressed and int(call.table.counts().sum()) == len(new)
        alone = alone and (scoring.window is None or scoring.window >= longest)
        return alone and (tokens is new or np.array_equal(tokens.keys(1 << 40), new.keys(1 << 40)[last]))

    if not call.once(("fresh prompts", scoring.window, call.narrowed), fresh):
        return None
    if len(new) == np.diff(new.bounds).max():
        causal = tokens is new and len(new) > 1
        return attend_block(q_HLD, call.k_KLD, call.v_KLD, scoring.scale, causal=causal)
    return several(q_HLD, call.k_KLD, call.v_KLD, tokens, new, scoring.scale, call.once)


def several(
    q_HLD: Tensor, k_KLD: Tensor, v_KLD: Tensor, queries: TokenBlock, tokens: TokenBlock, scale: float, once: Once
) -> tuple[Tensor, Tensor] | None:
    """Causal attention of several sequences' packed tokens to each other, or of the last one of each.

    ``[H, L, D]`` and ``[H, L]``, as a call for each sequence gives them; None where FlashAttention takes no such heads,
    and where sequences are so long that a call for each takes no longer, by kernels that are faster.
    """
    dim, longest = q_HLD.shape[-1], int(np.diff(tokens.bounds).max())
    operations = 2.0 * len(q_HLD) * longest**2 * dim
    half = q_HLD.dtype in (torch.float16, torch.bfloat16) and q_HLD.dtype == k_KLD.dtype == v_KLD.dtype
    if not half or dim != v_KLD.shape[-1] or dim % MULTIPLE or dim > FLASH_DIM or operations >= CUDNN_OPERATIONS:
        return None
    if not _agrees(q_HLD.device, q_HLD.dtype, dim):
        return None

    def bounds(block: TokenBlock) -> Tensor:
        return upload(np.unique(block.bounds).astype(np.int32), q_HLD.device)

    single = queries is not tokens
    k_bounds = once("prompts", lambda: bounds(tokens))
    q_bounds = once("last of prompts", lambda: bounds(queries)) if single else k_bounds
    return _flash(q_HLD, k_KLD, v_KLD, q_bounds, k_bounds, 1 if single else longest, longest, scale)


def _flash(
    q_HLD: Tensor, k_KLD: Tensor, v_KLD: Tensor, q_bounds: Tensor, k_bounds: Tensor, rows: int, keys: int, scale: float
) -> tuple[Tensor, Tensor]:
    packed = (each.transpose(0, 1) for each in (q_HLD, k_KLD, v_KLD))
    out_LHD, lse_HL = torch.ops.aten._flash_attention_forward(
        *packed, q_bounds, k_bounds, rows, keys, 0.0, rows > 1, False, scale=scale
    )[:2]
    return out_LHD.transpose(0, 1), lse_HL


@functools.cache
def _agrees(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether FlashAttention gives the reference's results, tried once on a small example."""
    generator, lengths = torch.Generator("cpu").manual_seed(0), [70, 1, 33]
    q, k, v = (torch.randn(heads, 104, dim, generator=generator, device="cpu").to(device, dtype) for heads in (4, 2, 2))
    ends = np.cumsum(lengths)
    at, one = (upload(np.array([0, *each], dtype=np.int32), device) for each in (ends, (1, 2, 3)))
    whole = []
    for end, length in zip(ends, lengths, strict=True):
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
        own = slice(end - length, end)
        whole.append(dense_attention(q[:, own], k[:, own], v[:, own], dim**-0.5, visible_LS=seen))
    out, lse = (torch.cat(each, dim=1) for each in zip(*whole, strict=True))
    q_last, out_last, lse_last = (each.index_select(1, at[1:] - 1) for each in (q, out, lse))
    results: list[Result] = [
        (functools.partial(_flash, q, k, v, at, at, 70, 70, dim**-0.5), (out, lse)),
        (functools.partial(_flash, q_last, k, v, one, at, 1, 70, dim**-0.5), (out_last, lse_last)),
    ]
    return trusted(_flash, results, dtype, f"prompts in {dtype} with head dim {dim} on {device}")
