"""One query row of each of several sequences in few kernel calls: decoding a batch.

A call for each sequence takes Python longer to start than it takes to compute. On processors one call takes all
(`megakv.attention.runs`); on CUDA, sequences whose keys and values are of one shape and lie at one distance from each
other, as in the offload engine's buffers, need one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megakv.attention.backends import Backend, cuda_efficient, cuda_flash, select
from megakv.attention.part import KVPart, Part
from megakv.attention.partial import Scoring
from megakv.attention.runs import attend_runs
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
    q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, parts: Sequence[Part]
) -> tuple[Tensor, Tensor] | None:
    """``[H, L, Dv]`` float32 outputs and ``[H, L]`` log-sum-exps of one row of each sequence.

    None where no kernel takes them together.

    Parameters
    ----------
    q_HLD : Tensor
        ``[H, L, D]`` queries.
    tokens : TokenBlock
        Their tokens, of which `is_decoding` is true.
    scoring : Scoring
    parts : sequence of Part
        What they attend to.
    """
    own = [part for part in parts if isinstance(part, KVPart)]
    if len(own) < len(parts):
        return None
    return (attend_runs if q_HLD.device.type == "cpu" else attend_alike)(q_HLD, tokens, scoring, own)


def attend_alike(
    q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, parts: Sequence[KVPart]
) -> tuple[Tensor, Tensor] | None:
    """The same on CUDA; None also for sequences without keys or with several parts, and for hidden keys."""
    if len(parts) < 2 or [part.sequence for part in parts] != tokens.sequence.tolist():
        return None
    kernel = KERNELS.get(select(q_HLD, parts[0].v_KSD.shape[-1], masked=False))
    if kernel is None or not _plain(q_HLD, scoring, parts[0]) or not _all_visible(tokens, scoring, parts):
        return None
    heads, rows, _ = q_HLD.shape
    kv_heads, dim = parts[0].k_KSD.shape[0], parts[0].v_KSD.shape[-1]
    # Heads that share a KV head go in as its rows.
    q_BKGD = q_HLD.transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, -1)
    found = []
    for first, last in _alike(parts):
        k_BKSD, v_BKSD = (_stacked([getattr(part, name) for part in parts[first:last]]) for name in ("k_KSD", "v_KSD"))
        found.append(kernel(q_BKGD[first:last], k_BKSD, v_BKSD, scoring.scale))
    out, lse = (torch.cat(each) if len(found) > 1 else each[0] for each in zip(*found, strict=True))
    return out.reshape(rows, heads, dim).transpose(0, 1).float(), lse.reshape(rows, heads).t()


def _plain(q_HLD: Tensor, scoring: Scoring, part: KVPart) -> bool:
    """Whether nothing is added to the scores, and head dims are as the kernels have them."""
    dims = {q_HLD.shape[-1], part.v_KSD.shape[-1]}
    return scoring.plain and len(dims) == 1 and not dims.pop() % MULTIPLE


def _all_visible(tokens: TokenBlock, scoring: Scoring, parts: Sequence[KVPart]) -> bool:
    """Whether every row sees all keys of its sequence."""
    if not all(len(part.slots) for part in parts):
        return False
    first, last = (np.array([part.slots[index] for part in parts]) for index in (0, -1))
    return sees_all(tokens.slot, first, last, scoring.window)


def _alike(parts: Sequence[KVPart]) -> Iterator[tuple[int, int]]:
    """Runs of parts whose keys, and values, are alike and at one distance from each other."""
    kinds = [(part.k_KSD.shape, part.k_KSD.stride(), part.v_KSD.shape, part.v_KSD.stride()) for part in parts]
    places = [(part.k_KSD.data_ptr(), part.v_KSD.data_ptr()) for part in parts]
    steps = [(one[0] - other[0], one[1] - other[1]) for other, one in pairwise(places)]
    first = 0
    for index in range(1, len(parts)):
        alike = kinds[index] == kinds[first] and steps[index - 1] == steps[first] and min(steps[first]) > 0
        if not (alike and _one_memory(parts[first], parts[index])):
            yield first, index
            first = index
    yield first, len(parts)


def _one_memory(one: KVPart, other: KVPart) -> bool:
    return (
        one.k_KSD.untyped_storage().data_ptr() == other.k_KSD.untyped_storage().data_ptr()
        and one.v_KSD.untyped_storage().data_ptr() == other.v_KSD.untyped_storage().data_ptr()
    )


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """``[B, ...]`` view of tensors that lie alike in one memory, at one distance from each other."""
    first = tensors[0]
    step = tensors[1].storage_offset() - first.storage_offset() if len(tensors) > 1 else 0
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), first.storage_offset())
