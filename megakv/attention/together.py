"""One query row of each of several sequences in few kernel calls: decoding a batch whose rows lie in one buffer.

A call for each sequence takes Python longer to start than it takes to compute. On processors one call takes all; on
CUDA, sequences of one length that lie at one distance from each other need one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megakv.attention.backends import Backend, cuda_efficient, cuda_flash, select
from megakv.attention.compiled import TYPES, RunTable, Strides, load_kernel
from megakv.attention.part import PackedRows
from megakv.attention.partial import Scoring
from megakv.attention.spacing import alike, stacked
from megakv.sharding import IntArray, TokenBlock

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


def is_decoding(tokens: TokenBlock) -> bool:
    """Whether no sequence has more than one token."""
    return len(tokens) <= 1 or bool((np.diff(tokens.sequence) > 0).all())


def sees_all(slots: IntArray, first: IntArray, last: IntArray, window: int | None) -> bool:
    """Whether every row, at its slot, sees all keys from its first to its last one: ``[L]`` each."""
    near = window is None or bool((first > slots - window).all())
    return near and bool((last <= slots).all())


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
        Their tokens, of which `is_decoding` is true.
    scoring : Scoring
    packed : PackedRows
        What they attend to.
    """
    rows = tokens.sequence
    first, count = packed.first[rows], packed.count[rows]
    held = count > 0
    if not (scoring.plain and held.any()):
        return None
    if not sees_all(tokens.slot[held], packed.low[rows][held], packed.high[rows][held], scoring.window):
        return None
    attend = _on_processor if q_HLD.device.type == "cpu" else _on_cuda
    return attend(q_HLD, scoring.scale, packed, first, count)


def _on_processor(
    q_HLD: Tensor, scale: float, packed: PackedRows, first: IntArray, count: IntArray
) -> tuple[Tensor, Tensor] | None:
    kernel, _ = load_kernel()
    k_KRD, v_KRD = packed.k_KRD, packed.v_KRD
    known = q_HLD.dtype == k_KRD.dtype and q_HLD.dtype in TYPES
    if kernel is None or not known or not kernel.few(q_HLD.shape[0] // len(k_KRD), 1):
        return None
    assert k_KRD.stride(2) == v_KRD.stride(2) == 1, "rows are not in one piece"
    strides, held = Strides(*k_KRD.stride()[:2], *v_KRD.stride()[:2]), count > 0
    places = [each.data_ptr() + first * (each.stride(1) * each.element_size()) for each in (k_KRD, v_KRD)]
    runs = np.stack([*places, count], axis=1)[held]
    table = RunTable(runs, np.concatenate([[0], np.cumsum(held)]))
    out, lse = kernel.attend(q_HLD.transpose(0, 1)[:, :, None], table, len(k_KRD), v_KRD.shape[2], strides, scale)
    return out[:, :, 0].transpose(0, 1), lse[:, :, 0].t()


def _on_cuda(
    q_HLD: Tensor, scale: float, packed: PackedRows, first: IntArray, count: IntArray
) -> tuple[Tensor, Tensor] | None:
    heads, rows, dim = q_HLD.shape
    kv_heads, _, value_dim = packed.v_KRD.shape
    kernel = KERNELS.get(select(q_HLD, value_dim, masked=False))
    if kernel is None or dim != value_dim or dim % MULTIPLE or not count.all():
        return None
    # Heads that share a KV head go in as its rows.
    q_BKGD = q_HLD.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, dim)
    found = []
    for begin, end in alike(first, count):
        k_BKSD, v_BKSD = (
            stacked(each, first[begin:end].tolist(), int(count[begin])) for each in (packed.k_KRD, packed.v_KRD)
        )
        found.append(kernel(q_BKGD[begin:end], k_BKSD, v_BKSD, scale))
    out, lse = (torch.cat(each) if len(found) > 1 else each[0] for each in zip(*found, strict=True))
    return out.reshape(rows, heads, value_dim).transpose(0, 1).float(), lse.reshape(rows, heads).t()
