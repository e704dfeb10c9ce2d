"""One query row of each of several sequences in few kernel calls: decoding a batch whose rows lie in one buffer.

A call for each sequence takes Python longer to start than it takes to compute. On processors one call takes all; on
CUDA, sequences of one length that lie at one distance from each other need one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megakv.attention.backends import Backend, cuda_efficient, cuda_flash, select
from megakv.attention.compiled import TYPES, Run, RunTable, Strides, load_kernel
from megakv.attention.part import PackedRows
from megakv.attention.partial import Scoring
from megakv.attention.spacing import alike, stacked
from megakv.attention.visibility import sees_all
from megakv.distributed.sharding import TokenBlock

Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
MULTIPLE = 8
"""The kernels take head dims that are multiples of that; others are left to calls by sequence, which pad them."""


def _flash(q_BKGD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
        q_BKGD, k_BKSD, v_BKSD, 0.0, False, False, scale=scale
    )[:2]
    return out, lse


def _efficient(q_BKGD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BKGD, k_BKSD, v_BKSD, None, True, 0.0, False, scale=scale
    )[:2]
    # Its log-sum-exp has rows added up to a multiple of 32.
    return out, lse[..., : q_BKGD.shape[2]]


KERNELS: dict[Backend, Kernel] = {cuda_flash: _flash, cuda_efficient: _efficient}
"""What takes several sequences, by the backend that takes one."""


def attend_together(
    q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, packed: PackedRows
) -> tuple[Tensor, Tensor] | None:
    """``[H, L, Dv]`` float32 outputs and ``[H, L]`` log-sum-exps of one row of each sequence.

    None where there is more to it: hidden keys, terms added to scores, a type that no kernel takes, or no kernel; on
    CUDA also sequences without keys.

    Parameters
    ----------
    q_HLD : Tensor
        ``[H, L, D]`` queries.
    tokens : TokenBlock
        Their tokens, `single`.
    scoring : Scoring
    packed : PackedRows
        What they attend to.
    """
    sequences = tokens.sequences
    first, count = ([each[sequence] for sequence in sequences] for each in (packed.first, packed.count))
    if not scoring.plain or not any(count):
        return None
    for slot, sequence, rows in zip(tokens.slot, sequences, count, strict=True):
        slots = packed.slots[sequence]
        if rows and not sees_all(slot, slots, len(slots) - rows, rows, scoring.window):
            return None
    attend = _on_processor if q_HLD.device.type == "cpu" else _on_cuda
    return attend(q_HLD, scoring.scale, packed, first, count)


def _on_processor(
    q_HLD: Tensor, scale: float, packed: PackedRows, first: list[int], count: list[int]
) -> tuple[Tensor, Tensor] | None:
    kernel, _ = load_kernel()
    k_KRD, v_KRD = packed.k_KRD, packed.v_KRD
    known = q_HLD.dtype == k_KRD.dtype and q_HLD.dtype in TYPES
    if kernel is None or not known or not kernel.few(q_HLD.shape[0] // len(k_KRD), 1):
        return None
    (k_head, k_row, k_inner), (v_head, v_row, v_inner) = k_KRD.stride(), v_KRD.stride()
    assert k_inner == v_inner == 1, "rows are not in one piece"
    k, v, size = k_KRD.data_ptr(), v_KRD.data_ptr(), k_KRD.element_size()
    runs = [
        [Run(k + at * k_row * size, v + at * v_row * size, rows)] if rows else []
        for at, rows in zip(first, count, strict=True)
    ]
    strides = Strides(k_head, k_row, v_head, v_row)
    call = kernel.ready(
        q_HLD.transpose(0, 1).unsqueeze(2), RunTable.of(runs), len(k_KRD), v_KRD.shape[2], strides, scale
    )
    call()
    return call.by_head()


def _on_cuda(
    q_HLD: Tensor, scale: float, packed: PackedRows, first: list[int], count: list[int]
) -> tuple[Tensor, Tensor] | None:
    heads, rows, dim = q_HLD.shape
    kv_heads, _, value_dim = packed.v_KRD.shape
    kernel = KERNELS.get(select(q_HLD, value_dim, masked=False))
    if kernel is None or dim != value_dim or dim % MULTIPLE or not all(count):
        return None
    # Heads that share a KV head go in as its rows.
    q_BKGD = q_HLD.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
    found = []
    for begin, end in alike(first, count):
        k_BKSD, v_BKSD = (stacked(each, first[begin:end], count[begin]) for each in (packed.k_KRD, packed.v_KRD))
        found.append(kernel(q_BKGD[begin:end], k_BKSD, v_BKSD, scale))
    out, lse = (torch.cat(each) if len(found) > 1 else each[0] for each in zip(*found, strict=True))
    return out.reshape(rows, heads, value_dim).transpose(0, 1).float(), lse.reshape(rows, heads).t()
