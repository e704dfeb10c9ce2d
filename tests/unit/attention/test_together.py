"""One row of each of several sequences in few calls: the results of a call for each."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megakv.attention import together
from megakv.attention.backends import cpu_flash
from megakv.attention.method import PackedAttention
from megakv.attention.part import KVPart
from megakv.attention.partial import Scoring
from megakv.attention.together import attend_alike, is_decoding
from megakv.sharding import TokenBlock

HEADS, DIM = 6, 16


def tokens_at(slots: list[int]) -> TokenBlock:
    where = np.array(slots, dtype=np.int64)
    return TokenBlock(np.arange(len(slots)), where, where, len(slots))


def parts_of(lengths: list[int], kv_heads: int, *, room: int, dim: int = DIM, **kind: Any) -> list[KVPart]:
    """Keys and values of sequences one behind the other, as in the buffers of the offload engine."""
    rows = torch.randn(sum(lengths) + room * len(lengths), 2 * kv_heads * dim, **kind)
    found, at = [], 0
    for sequence, length in enumerate(lengths):
        keys, values = rows[at : at + length].unflatten(1, (2, kv_heads, dim)).permute(1, 2, 0, 3)
        found.append(KVPart(sequence, keys, values, np.arange(length), np.arange(length)))
        at += length + room
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences of every kernel call; the kernel is the CPU's."""
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


def check(parts: list[KVPart], tokens: TokenBlock, scoring: Scoring) -> None:
    queries = torch.randn(len(tokens), HEADS, DIM).transpose(0, 1)
    expected = PackedAttention(queries, tokens, scoring, DIM)
    for part in parts:
        expected.add(part)
    found = attend_alike(queries, tokens, scoring, parts)
    assert found is not None
    for one, other in zip(found, expected.result(), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([5] * 7, [7]), ([9, 9, 9, 8, 8], [3, 2]), ([4, 1], [1, 1]), ([3, 7, 7, 2, 2, 2, 9], [1, 2, 3, 1])],
)
def test_sequences_that_lie_alike_need_one_call(
    kv_heads: int, lengths: list[int], expected: list[int], calls: list[int]
) -> None:
    parts = parts_of(lengths, kv_heads, room=random.randint(0, 3))
    tokens = tokens_at([length - 1 for length in lengths])
    check(parts, tokens, Scoring(0.3))
    assert calls == expected
    check(parts, tokens, Scoring(0.3, window=max(lengths)))


def test_memory_of_their_own_takes_calls_of_their_own(calls: list[int]) -> None:
    parts = [parts_of([5], 2, room=0)[0] for _ in range(4)]
    parts = [KVPart(index, part.k_KSD, part.v_KSD, part.slots, part.positions) for index, part in enumerate(parts)]
    check(parts, tokens_at([4] * 4), Scoring(1.0))
    assert calls == [1] * 4


def test_what_is_more_than_that_is_left_to_others(calls: list[int]) -> None:
    parts, tokens = parts_of([5, 5, 5], 2, room=1), tokens_at([4, 4, 4])
    queries = torch.randn(HEADS, 3, DIM)
    for scoring in (Scoring(1.0, window=4), Scoring(1.0, softcap=5.0), Scoring(1.0, alibi_slopes=torch.ones(HEADS))):
        assert attend_alike(queries, tokens, scoring, parts) is None
    assert attend_alike(queries, tokens_at([4, 3, 4]), Scoring(1.0), parts) is None
    assert attend_alike(queries, tokens, Scoring(1.0), [*parts, parts[0]]) is None
    assert attend_alike(queries, tokens, Scoring(1.0), parts[:2]) is None
    assert attend_alike(queries.double(), tokens, Scoring(1.0), parts) is None and not calls
    assert is_decoding(tokens) and not is_decoding(TokenBlock(np.array([0, 0, 1]), tokens.slot, tokens.slot, 2))
