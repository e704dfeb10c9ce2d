"""One row of each of several sequences in few calls on CUDA: the results of a call for each."""

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megakv.attention import together
from megakv.attention.backends import cpu_flash
from megakv.attention.partial import KVPart, PackedAttention, Scoring
from megakv.attention.together import PackedRows, attend_together
from megakv.distributed.sharding import TokenBlock

HEADS, DIM = 6, 16


def tokens_at(slots: list[int]) -> TokenBlock:
    where = np.array(slots, dtype=np.int64)
    return TokenBlock(np.arange(len(slots)), where, where, len(slots))


def packed_rows(
    lengths: list[int], kv_heads: int, *, room: int, dim: int = DIM, first: int = 0, **kind: Any
) -> PackedRows:
    """Rows of sequences one behind the other, as in the buffers of the offload engine; `first` is everyone's slot."""
    rows = torch.randn(sum(lengths) + room * len(lengths), 2 * kv_heads * dim, **kind)
    keys, values = rows.unflatten(1, (2, kv_heads, dim)).permute(1, 2, 0, 3)
    starts = [0, *accumulate(length + room for length in lengths[:-1])]
    return PackedRows(keys, values, starts, lengths, [np.arange(first, first + length) for length in lengths])


def one_by_one(queries: Tensor, tokens: TokenBlock, scoring: Scoring, packed: PackedRows) -> tuple[Tensor, Tensor]:
    expected = PackedAttention(queries, tokens, scoring, packed.v_KRD.shape[2])
    for sequence, (first, count, where) in enumerate(zip(packed.first, packed.count, packed.slots, strict=True)):
        rows = slice(first, first + count)
        expected.add(KVPart(sequence, packed.k_KRD[:, rows], packed.v_KRD[:, rows], where, where))
    return expected.result()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences of every kernel call as CUDA has them; the kernel is the CPU's."""
    seen: list[int] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        seen.append(len(q))
        group = q.shape[2]
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.flatten(1, 2).unsqueeze(2), k, v, 0.0, False, scale=scale
        )
        return out.unflatten(1, (-1, group)).squeeze(3), lse.unflatten(1, (-1, group)).squeeze(3)

    monkeypatch.setitem(together.KERNELS, cpu_flash, kernel)
    return seen


def check(packed: PackedRows, tokens: TokenBlock, scoring: Scoring) -> None:
    queries = torch.randn(len(tokens), HEADS, DIM).transpose(0, 1)
    found = attend_together(queries, tokens, scoring, packed)
    assert found is not None
    for one, other in zip(found, one_by_one(queries, tokens, scoring, packed), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([5] * 7, [7]), ([9, 9, 9, 8, 8], [3, 2]), ([4, 1], [1, 1]), ([3, 7, 7, 2, 2, 2, 9], [1, 2, 3, 1])],
)
def test_sequences_that_lie_alike_need_one_call(
    kv_heads: int, lengths: list[int], expected: list[int], calls: list[int]
) -> None:
    packed = packed_rows(lengths, kv_heads, room=random.randint(0, 3))
    tokens = tokens_at([length - 1 for length in lengths])
    check(packed, tokens, Scoring(0.3))
    assert calls == expected
    check(packed, tokens, Scoring(0.3, window=max(lengths)))


def test_what_is_more_than_that_is_left_to_others(calls: list[int]) -> None:
    packed, tokens = packed_rows([5, 5, 5], 2, room=1), tokens_at([4, 4, 4])
    queries = torch.randn(HEADS, 3, DIM)
    for scoring in (Scoring(1.0, window=4), Scoring(1.0, softcap=5.0), Scoring(1.0, alibi_slopes=torch.ones(HEADS))):
        assert attend_together(queries, tokens, scoring, packed) is None
    assert attend_together(queries, tokens_at([4, 3, 4]), Scoring(1.0), packed) is None
    nothing = replace(packed, count=[0, 0, 0])
    assert attend_together(queries, tokens, Scoring(1.0), nothing) is None
    assert attend_together(queries, tokens, Scoring(1.0), replace(packed, count=[5, 0, 5])) is None
    assert attend_together(queries.double(), tokens, Scoring(1.0), packed) is None and not calls
    assert tokens.single and not TokenBlock(np.array([0, 0, 1]), tokens.slot, tokens.slot, 2).single
