"""One query row of each of several sequences in few kernel calls: decoding a batch.

A call for each sequence takes Python longer to start than it takes to compute. On processors one call takes all,
wherever rows lie; on CUDA, sequences of one length that lie in one buffer, at one distance from each other, need one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megakv.attention.backends import Backend, cuda_efficient, cuda_flash, select
from megakv.attention.compiled import RUN_WORDS, DecodeKernel, RowTable, Run, load_kernel
from megakv.attention.partial import PackedAttention, Part, Scoring
from megakv.attention.visibility import sees_all
from megakv.base.library import TYPES
from megakv.distributed.sharding import IntArray, TokenBlock

Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
MULTIPLE = 8
"""The kernels take head dims that are multiples of that; others are left to calls by sequence, which pad them."""


@dataclass(frozen=True)
class PackedRows:
    """Keys and values of several sequences in one buffer."""

    k_KRD: Tensor
    v_KRD: Tensor
    first: list[int]
    """``[B]`` the first row of each sequence, of which there are `count`."""
    count: list[int]
    slots: Sequence[IntArray]
    """Of each sequence, ascending; its rows are those of the last ones."""


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
    """``[H, L, Dv]`` float32 outputs and ``[H, L]`` log-sum-exps of one row of each sequence, on CUDA.

    None where there is more to it: hidden keys, terms added to scores, a type that no kernel takes, no kernel, or
    sequences without keys.
    """
    sequences = tokens.sequences
    first, count = ([each[sequence] for sequence in sequences] for each in (packed.first, packed.count))
    if not scoring.plain or not any(count):
        return None
    for slot, sequence, rows in zip(tokens.slot, sequences, count, strict=True):
        slots = packed.slots[sequence]
        if rows and not sees_all(slot, slots, len(slots) - rows, rows, scoring.window):
            return None
    return _on_cuda(q_HLD, scoring.scale, packed, first, count)


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


def attend_rows(
    q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, kv_heads: int, value_dim: int, parts: Sequence[Part]
) -> tuple[Tensor, Tensor]:
    """``[H, L, Dv]`` and ``[H, L]`` of all rows over these parts.

    On processors all sequences that have one row are one call of the compiled kernel, as far as it takes their parts;
    rows of other sequences, as of prompts that are read beside them, go block by block.
    """
    lengths, runs = np.diff(tokens.bounds), dict[int, list[IntArray]]()
    kernel, _ = load_kernel()
    if kernel is not None and q_HLD.device.type == "cpu" and q_HLD.dtype in TYPES and scoring.plain:
        single = np.flatnonzero(lengths == 1)
        if kernel.few(len(q_HLD) // kv_heads, 1) and (len(single) > 1 or len(single) == len(tokens)):
            runs = {sequence: [] for sequence in single.tolist()}
    for part in parts:
        if (own := runs.get(part.sequence)) is not None:
            if (where := part.runs(q_HLD, int(tokens.slot[tokens.bounds[part.sequence]]), scoring)) is None:
                del runs[part.sequence]
            else:
                own.append(where)
    if kernel is not None and runs and len(runs) == len(tokens):
        return _in_one_call(kernel, q_HLD, list(runs.values()), kv_heads, value_dim, scoring.scale)
    apart = np.flatnonzero(~np.isin(tokens.sequence, list(runs)))
    whole = PackedAttention(q_HLD[:, apart] if runs else q_HLD, tokens.take(apart), scoring, value_dim)
    for part in parts:
        if part.sequence not in runs:
            whole.add(part)
    if kernel is None or not runs:
        return whole.result()
    rows = tokens.bounds[list(runs)]
    found = _in_one_call(kernel, q_HLD[:, rows], list(runs.values()), kv_heads, value_dim, scoring.scale)
    out = torch.empty((*q_HLD.shape[:2], value_dim), dtype=torch.float32)
    lse = torch.empty(q_HLD.shape[:2], dtype=torch.float32)
    for index, (some_out, some_lse) in ((rows, found), (apart, whole.result())):
        out[:, index], lse[:, index] = some_out, some_lse
    return out, lse


def _in_one_call(
    kernel: DecodeKernel, q_HLD: Tensor, runs: Sequence[list[IntArray]], kv_heads: int, value_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """One row of each of several sequences: ``[H, L, Dv]`` and ``[H, L]``, float32."""
    (heads, rows, dim), counts, flat = q_HLD.shape, list(map(len, runs)), [each for own in runs for each in own]
    empty = np.zeros((0, RUN_WORDS), dtype=np.int64)
    if all(len(each) == 1 for each in flat):
        table = RowTable.at(np.concatenate([empty, *flat]), counts, runs)
        call = kernel.ready(q_HLD.transpose(0, 1).unsqueeze(2), table, kv_heads, value_dim, scale)
        call()
        return call.by_head()
    # Heads keep tokens of their own: to the kernel each is a sequence, with the runs that its own sequence has.
    size = q_HLD.element_size()
    each = [
        np.stack([_by_head(part, kv_heads, size) for part in own], axis=1).reshape(-1, RUN_WORDS) for own in runs if own
    ]
    table = RowTable.at(np.concatenate(each), np.repeat(counts, kv_heads).tolist(), runs)
    out, lse = kernel.ready(q_HLD.transpose(0, 1).reshape(rows * kv_heads, -1, 1, dim), table, 1, value_dim, scale)()
    return out.view(rows, heads, value_dim).transpose(0, 1), lse.view(rows, heads).t()


def _by_head(runs: IntArray, kv_heads: int, itemsize: int) -> IntArray:
    """``[K, 9]`` a `Run` for each head, given those or one ``[1, 9]`` of all heads."""
    if len(runs) == kv_heads:
        return runs
    run, table = Run(*runs[0].tolist()), np.repeat(runs, kv_heads, axis=0)
    for column, step in enumerate((run.k_head, run.v_head)):
        # The address, and what lies behind it.
        table[:, column::7] += np.outer(np.arange(kv_heads), (step * itemsize, -step))
    return table
