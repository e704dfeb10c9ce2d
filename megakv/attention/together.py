"""One query row of each of several sequences in few kernel calls: decoding a batch whose rows lie in one buffer.

A call for each sequence takes Python longer to start than it takes to compute. On processors one call takes all; on
CUDA, sequences of one length that lie at one distance from each other need one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megakv.attention.backends import Backend, cuda_efficient, cuda_flash, select
from megakv.attention.compiled import TYPES, Run, RunTable, Strides, load_kernel
from megakv.attention.part import KVPart, PackedRows, Part
from megakv.attention.partial import Scoring
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


def alike(first: Sequence[int], count: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and end of consecutive runs that are alike, given the first row of each and how many it has."""
    begin = 0
    for index in range(1, len(first)):
        step = first[index] - first[index - 1]
        if count[index] != count[begin] or step != first[begin + 1] - first[begin] or step <= 0:
            yield begin, index
            begin = index
    yield begin, len(first)


def stacked(rows_KRD: Tensor, first: Sequence[int], count: int) -> Tensor:
    """``[B, K, S, D]`` view of `B` alike runs of `S` rows of ``[K, R, D]``."""
    head, row, inner = rows_KRD.stride()
    step = row * (first[1] - first[0]) if len(first) > 1 else 0
    shape = (len(first), rows_KRD.shape[0], count, rows_KRD.shape[2])
    return rows_KRD.as_strided(shape, (step, head, row, inner), rows_KRD.storage_offset() + row * first[0])


def attend_runs(
    q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, parts: Sequence[Part]
) -> tuple[Tensor, Tensor] | None:
    """``[H, L, Dv]`` float32 outputs and ``[H, L]`` log-sum-exps of one row of each sequence, where its parts lie.

    None where there is more to it: nothing to attend to, hidden keys, terms added to scores, a layout or a type that
    the kernel does not read, or no kernel. Queries are on the processor; a sequence may have any number of parts.
    """
    kernel, _ = load_kernel()
    dense = [part for part in parts if isinstance(part, KVPart)]
    if kernel is None or not dense or len(dense) < len(parts) or not scoring.plain or q_HLD.dtype not in TYPES:
        return None
    kv_heads, value_dim = dense[0].k_KSD.shape[0], dense[0].v_KSD.shape[2]
    if not kernel.few(q_HLD.shape[0] // kv_heads, 1):
        return None
    rows = {sequence: row for row, sequence in enumerate(tokens.sequences)}
    runs: list[list[Run]] = [[] for _ in rows]
    strides: list[Strides | None] = [None] * len(rows)
    for part in dense:
        row = rows.get(part.sequence)
        if row is None or not len(part.slots):
            continue
        k_KSD, v_KSD = part.k_KSD, part.v_KSD
        if not sees_all(tokens.slot[row], part.slots, 0, len(part.slots), scoring.window):
            return None
        k_strides, v_strides = k_KSD.stride(), v_KSD.stride()
        own = Strides(*k_strides[:2], *v_strides[:2])
        # It reads addresses: what does not fit together must not come to it.
        fits = q_HLD.dtype == k_KSD.dtype == v_KSD.dtype and k_strides[2] == v_strides[2] == 1
        if not fits or k_KSD.shape[2] != q_HLD.shape[2] or strides[row] not in (None, own):
            return None
        strides[row] = own
        runs[row].append(Run(k_KSD.data_ptr(), v_KSD.data_ptr(), k_KSD.shape[1]))
    kinds: dict[Strides, list[int]] = {}
    for row, found in enumerate(strides):
        if found is not None:
            kinds.setdefault(found, []).append(row)
    q_BHLD = q_HLD.transpose(0, 1).unsqueeze(2)
    if len(kinds) == 1:
        out, lse = kernel.attend(q_BHLD, RunTable.of(runs), kv_heads, value_dim, kinds.popitem()[0], scoring.scale)
    elif kinds:
        count, heads = len(runs), q_HLD.shape[0]
        out = q_HLD.new_zeros((count, heads, 1, value_dim), dtype=torch.float32)
        lse = q_HLD.new_full((count, heads, 1), float("-inf"), dtype=torch.float32)
        for kind, chosen in kinds.items():
            table = RunTable.of([runs[row] for row in chosen])
            out[chosen], lse[chosen] = kernel.attend(q_BHLD[chosen], table, kv_heads, value_dim, kind, scoring.scale)
    else:
        return None
    return out.select(2, 0).transpose(0, 1), lse.select(2, 0).t()
