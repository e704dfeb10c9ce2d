"""One query row of each of several sequences in few kernel calls: decoding a batch whose rows lie in one buffer.

A call for each sequence takes Python longer to start than it takes to compute. On processors one call takes all; on
CUDA, sequences of one length that lie at one distance from each other need one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megakv.attention.backends import Backend, cuda_efficient, cuda_flash, select
from megakv.attention.compiled import Run, RunTable, load_kernel
from megakv.attention.partial import KVPart, PackedAttention, Part, Scoring
from megakv.attention.visibility import sees_all
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
    k_KRD, v_KRD = packed.k_KRD, packed.v_KRD
    if not _computes(q_HLD, k_KRD, v_KRD):
        return None
    every, size = Run.of(k_KRD, v_KRD), k_KRD.element_size()
    return _decode(
        q_HLD,
        [[every.part(at, rows, size)] if rows else [] for at, rows in zip(first, count, strict=True)],
        len(k_KRD),
        v_KRD.shape[2],
        scale,
    )


def _computes(q_HLD: Tensor, k_KSD: Tensor, v_KSD: Tensor) -> bool:
    """Whether the compiled kernel takes one query row of each sequence over such keys and values."""
    kernel, _ = load_kernel()
    group = q_HLD.shape[0] // k_KSD.shape[0]
    return kernel is not None and kernel.few(group, 1) and kernel.reads(q_HLD, k_KSD, v_KSD)


def _decode(
    q_HLD: Tensor, runs: Sequence[Sequence[Run]], kv_heads: int, value_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    kernel, _ = load_kernel()
    assert kernel is not None
    table = RunTable.of(runs)
    if len(runs) == 1:
        return kernel.ready(q_HLD, table, kv_heads, value_dim, scale)()
    call = kernel.ready(q_HLD.transpose(0, 1).unsqueeze(2), table, kv_heads, value_dim, scale)
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
    if not scoring.plain:
        return None
    rows = {sequence: row for row, sequence in enumerate(tokens.sequences)}
    runs: list[list[Run]] = [[] for _ in rows]
    kv_heads = value_dim = 0
    for part in parts:
        if not isinstance(part, KVPart):
            return None
        sequence, keys, values, slots, _ = part
        values = scoring.values(keys, values)
        if not _computes(q_HLD, keys, values):
            return None
        row = rows.get(sequence)
        if row is None or not len(slots):
            continue
        if not sees_all(tokens.slot[row], slots, 0, len(slots), scoring.window):
            return None
        runs[row].append(Run.of(keys, values))
        kv_heads, _, value_dim = values.shape
    return _decode(q_HLD, runs, kv_heads, value_dim, scoring.scale) if kv_heads else None


def single_rows_apart(
    q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, value_dim: int, parts: Sequence[Part]
) -> tuple[Tensor, Tensor] | None:
    """Streams beside prompts that are read: the rows of all sequences that have one go into one kernel call.

    None where there are no two such, or no kernel takes them.
    """
    lengths = np.diff(tokens.bounds)
    single = lengths == 1
    if q_HLD.device.type != "cpu" or np.count_nonzero(single) < 2:
        return None
    rows, others = tokens.bounds[:-1][single], np.flatnonzero(lengths[tokens.sequence] > 1)
    found = attend_runs(q_HLD[:, rows], tokens.take(rows), scoring, [part for part in parts if single[part.sequence]])
    if found is None:
        return None
    rest = PackedAttention(q_HLD[:, others], tokens.take(others), scoring, value_dim)
    for part in parts:
        if not single[part.sequence]:
            rest.add(part)
    out = torch.empty((q_HLD.shape[0], q_HLD.shape[1], value_dim), dtype=torch.float32)
    lse = torch.empty(q_HLD.shape[:2], dtype=torch.float32)
    for index, (some_out, some_lse) in ((rows, found), (others, rest.result())):
        out[:, index], lse[:, index] = some_out, some_lse
    return out, lse
