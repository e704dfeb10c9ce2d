"""One query row of each of several sequences in one call of the compiled kernel: decoding a batch on processors.

A call for each sequence takes Python longer to prepare than it takes to attend to few tokens. Keys and values may lie
anywhere; where all lie in one buffer, `megakv.attention.together` need not look at each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megakv.attention.compiled import TYPES, Run, RunTable, Strides, load_kernel
from megakv.attention.part import KVPart, Part
from megakv.attention.partial import Scoring
from megakv.attention.visibility import sees_all
from megakv.distributed.sharding import TokenBlock


def attend_runs(
    q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, parts: Sequence[Part]
) -> tuple[Tensor, Tensor] | None:
    """``[H, L, Dv]`` float32 outputs and ``[H, L]`` log-sum-exps of one row of each sequence, where its parts lie.

    None where there is more to it: nothing to attend to, hidden keys, terms added to scores, a layout or a type that
    the kernel does not read, or no kernel.

    Parameters
    ----------
    q_HLD : Tensor
        ``[H, L, D]`` queries on the processor.
    tokens : TokenBlock
        Their tokens, no two of one sequence.
    scoring : Scoring
    parts : sequence of Part
        What they attend to: any number of each sequence, also none.
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
