"""Attention of few queries on CUDA, in kernels that read from device memory where the rows of a sequence lie.

Nothing that changes from step to step is an argument: neither addresses nor lengths. So a CUDA graph that has the
kernels in it serves any later step of as many sequences. The rows of each are split into as many parts as those of any
other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakv.attention.tiles import Tiles

RUN_WORDS = tl.constexpr(9)
"""Of a `megakv.attention.compiled.Run`."""
PROGRAMS = 528
"""Four for each multiprocessor of an H100: the keys of few sequences are split among as many."""
MOST_SPLITS = 64
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _store(
    k_ptr, v_ptr, k_head, k_row, v_head, v_row, bounds, runs, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr
):
    """Write each sequence's new row behind its others, where its last run has a place that counts already."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    if end > begin:
        run = runs + (end - 1) * RUN_WORDS
        row = tl.load(run + 2) - 1
        column = tl.arange(0, WIDTH)
        k_to = tl.load(run).to(k_ptr.dtype) + head * tl.load(run + 3) + row * tl.load(run + 4)
        v_to = tl.load(run + 1).to(v_ptr.dtype) + head * tl.load(run + 5) + row * tl.load(run + 6)
        key = tl.load(k_ptr + head * k_head + sequence * k_row + column, mask=column < D)
        value = tl.load(v_ptr + head * v_head + sequence * v_row + column, mask=column < DV)
        tl.store(k_to + column, key, mask=column < D)
        tl.store(v_to + column, value, mask=column < DV)


@triton.jit
def _attend(
    q_ptr, q_head, q_row, bounds, skips, runs, out_ptr, lse_ptr, scale, softcap,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial attention of one sequence's queries of one KV head to one of the parts that its rows are split into."""
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    begin, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    total = 0
    for index in range(begin, end):
        total += tl.load(runs + index * RUN_WORDS + 2).to(tl.int32)
    skip = tl.load(skips + sequence).to(tl.int32)
    share = tl.cdiv(tl.cdiv(tl.maximum(total - skip, 0), SPLITS), KEYS) * KEYS
    first = skip + split * share
    last = tl.minimum(first + share, total)

    row, column, v_column = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    q_at = q_ptr + (head * GROUP + row)[:, None] * q_head + sequence * q_row + column[None, :]
    q = tl.load(q_at, mask=(row[:, None] < GROUP) & (column[None, :] < D), other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total_out = tl.zeros([ROWS, V_WIDTH], tl.float32)
    before = 0
    for index in range(begin, end):
        run = runs + index * RUN_WORDS
        count = tl.load(run + 2).to(tl.int32)
        k_step, v_step = tl.multiple_of(tl.load(run + 4), 8), tl.multiple_of(tl.load(run + 6), 8)
        # Said of pointers, not of the numbers that they were: else elements are read one by one.
        k_base = tl.multiple_of(tl.load(run).to(q_ptr.dtype) + head * tl.load(run + 3), 16)
        v_base = tl.multiple_of(tl.load(run + 1).to(q_ptr.dtype) + head * tl.load(run + 5), 16)
        low, high = tl.maximum(first - before, 0), tl.minimum(last - before, count)
        for at in range(low, high, KEYS):
            rows = at + tl.arange(0, KEYS)
            here = rows < high
            k_at = k_base + rows.to(tl.int64)[:, None] * k_step + column[None, :]
            keys = tl.load(k_at, mask=here[:, None] & (column[None, :] < D), other=0.0)
            scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
            if CAPPED:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            scores = tl.where(here[None, :], scores * LOG2_E, float("-inf"))
            highest = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - highest[:, None])
            shrink = tl.exp2(top - highest)
            v_at = v_base + rows.to(tl.int64)[:, None] * v_step + v_column[None, :]
            values = tl.load(v_at, mask=here[:, None] & (v_column[None, :] < DV), other=0.0)
            part = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
            total_out = total_out * shrink[:, None] + part
            weight = weight * shrink + tl.sum(weights, 1)
            top = highest
        before += count
    seen = weight > 0
    total_out = total_out / tl.where(seen, weight, 1.0)[:, None]
    at = ((sequence * heads + head * GROUP + row) * SPLITS + split).to(tl.int64)
    written = row < GROUP
    tl.store(lse_ptr + at, tl.where(seen, top + tl.log2(tl.where(seen, weight, 1.0)), float("-inf")), mask=written)
    out_at = out_ptr + at[:, None] * DV + v_column[None, :]
    tl.store(out_at, total_out, mask=written[:, None] & (v_column[None, :] < DV))


@triton.jit
def _merge(
    part_ptr, lse_ptr, sinks, out_ptr, heads, DV: tl.constexpr, V_WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """All parts of one sequence's query of one head, by their log-sum-exps of base 2."""
    at = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, V_WIDTH)
    lse = tl.load(lse_ptr + at * SPLITS + split)
    top = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sinks + at % heads).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - shift)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - shift)
    parts_at = part_ptr + (at * SPLITS + split)[:, None] * DV + column[None, :]
    parts = tl.load(parts_at, mask=(column < DV)[None, :] & (split >= 0)[:, None], other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + at * DV + column, out.to(out_ptr.dtype.element_ty), mask=column < DV)


def attend_step(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scale: float, bounds: Tensor, skips: Tensor, runs: Tensor,
    *, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Store one new row of every sequence, and attend to all: ``[1, L, H, Dv]`` in the type of ``[1, H, L, D]``.

    Parameters
    ----------
    k_BKSD, v_BKSD : Tensor
        ``[1, K, L, D]`` and ``[1, K, L, Dv]`` new rows, of the queries' type as all others.
    bounds : Tensor
        ``[L + 1]`` int64: which `runs` each sequence has. One without any is stored nowhere, and its output is 0.
    skips : Tensor
        ``[L]`` int64: first rows that are not seen.
    runs : Tensor
        ``[n, 9]`` int64, each a `megakv.attention.compiled.Run` whose addresses are multiples of 16 bytes, and whose
        strides are of 8 elements; the last one of each sequence counts the new row.
    sinks : Tensor or None
        ``[H]`` scores of a key that every query sees, and whose value is zero.
    """
    (_, heads, rows, dim), kv_heads, value_dim = q_BHSD.shape, k_BKSD.shape[1], v_BKSD.shape[3]
    group, splits, device = heads // kv_heads, splits_for(rows * kv_heads), q_BHSD.device
    tiles = Tiles.of(group, dim, value_dim, q_BHSD.dtype, device)
    assert tiles is not None, "no room for tiles of such heads"
    _store[(rows, kv_heads)](
        k_BKSD, v_BKSD, k_BKSD.stride(1), k_BKSD.stride(2), v_BKSD.stride(1), v_BKSD.stride(2), bounds, runs,
        D=dim, DV=value_dim, WIDTH=max(tiles.width, tiles.value_width),
    )  # fmt: skip
    parts = torch.empty((rows, heads, splits, value_dim), dtype=torch.float32, device=device)
    lses = torch.empty((rows, heads, splits), dtype=torch.float32, device=device)
    _attend[(rows, kv_heads, splits)](
        q_BHSD, q_BHSD.stride(1), q_BHSD.stride(2), bounds, skips, runs, parts, lses, scale, softcap or 1.0,
        GROUP=group, ROWS=tiles.rows, D=dim, DV=value_dim, WIDTH=tiles.width, V_WIDTH=tiles.value_width,
        KEYS=tiles.keys, SPLITS=splits, CAPPED=softcap is not None,
        PRECISION="ieee" if q_BHSD.dtype == torch.float32 else "tf32", num_stages=tiles.stages,
    )  # fmt: skip
    out = q_BHSD.new_empty((1, rows, heads, value_dim))
    _merge[(rows * heads,)](
        parts, lses, lses if sinks is None else sinks, out, heads, DV=value_dim, V_WIDTH=tiles.value_width,
        SPLITS=splits, SINKS=sinks is not None,
    )  # fmt: skip
    return out


def splits_for(programs: int) -> int:
    """Into how many parts the rows of each of so many KV heads and sequences are split: a power of two."""
    return min(MOST_SPLITS, int(triton.next_power_of_2(max(1, PROGRAMS // programs))))
