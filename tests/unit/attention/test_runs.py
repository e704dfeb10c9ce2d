"""One row of each of several sequences in one call of the compiled kernel: the results of a call for each."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from megakv.attention import together
from megakv.attention.compiled import DecodeKernel, load_kernel
from megakv.attention.partial import KVPart, PackedAttention, Scoring
from megakv.attention.prefill import ROUNDED_TOLERANCE
from megakv.attention.together import attend_rows
from megakv.distributed.sharding import TokenBlock

pytestmark = pytest.mark.skipif(load_kernel()[0] is None, reason=f"no compiled kernel: {load_kernel()[1]}")


def tokens_at(slots: list[int], sequences: list[int] | None = None) -> TokenBlock:
    where = np.array(slots, dtype=np.int64)
    return TokenBlock(np.array(sequences or range(len(slots))), where, where, max(sequences or [len(slots)]) + 1)


def part(
    sequence: int, length: int, *, kv_heads: int, dims: tuple[int, int], first: int = 0, room: int = 0, **kind: Any
) -> KVPart:
    """Keys and values by head, in buffers with room behind each head's rows."""
    k_KSD, v_KSD = (torch.randn(kv_heads, length + room, dim, **kind)[:, :length] for dim in dims)
    where = np.arange(first, first + length)
    return KVPart(sequence, k_KSD, v_KSD, where, where)


def check(heads: int, tokens: TokenBlock, scoring: Scoring, parts: list[KVPart]) -> None:
    kind, (dim, value_dim) = parts[0].k_KSD.dtype, (parts[0].k_KSD.shape[2], parts[0].v_KSD.shape[2])
    queries = torch.randn(len(tokens), heads, dim).to(kind).transpose(0, 1)
    expected = PackedAttention(queries.double(), tokens, scoring, value_dim)
    for each in parts:
        expected.add(each._replace(k_KSD=each.k_KSD.double(), v_KSD=each.v_KSD.double()))
    found = attend_rows(queries, tokens, scoring, len(parts[0].k_KSD), value_dim, parts)
    for one, other in zip(found, expected.result(), strict=True):
        assert one.shape == other.shape and one.dtype == torch.float32
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences of every kernel call."""
    seen: list[int] = []
    ready = DecodeKernel.ready

    def counted(self: DecodeKernel, q_BHLD: torch.Tensor, *args: Any) -> Any:
        seen.append(len(q_BHLD) if q_BHLD.dim() == 4 else 1)
        return ready(self, q_BHLD, *args)

    monkeypatch.setattr(DecodeKernel, "ready", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (7, 1)])
def test_sequences_of_any_lengths_need_one_call(
    heads: int, kv_heads: int, dtype: torch.dtype, calls: list[int]
) -> None:
    lengths = [random.randint(1, 90) for _ in range(random.randint(1, 6))]
    parts = [
        part(index, length, kv_heads=kv_heads, dims=(24, 17), room=100 - length, dtype=dtype)
        for index, length in enumerate(lengths)
    ]
    check(heads, tokens_at([length - 1 for length in lengths]), Scoring(0.3), parts)
    check(heads, tokens_at([length + 3 for length in lengths]), Scoring(0.3, window=max(lengths) + 4), parts)
    assert calls == [len(lengths)] * 2


def test_sequences_have_several_parts_or_none(calls: list[int]) -> None:
    kind: dict[str, Any] = {"kv_heads": 2, "dims": (8, 8)}
    parts = [part(3, 20, **kind), part(0, 20, **kind), part(3, 20, first=20, **kind), part(1, 20, **kind)]
    # Sequence 1 has no query here, sequence 2 no keys, one part is empty, and one has a buffer of another shape.
    parts += [part(0, 0, first=20, **kind), part(0, 7, first=20, room=3, **kind)]
    check(4, tokens_at([27, 2, 40], sequences=[0, 2, 3]), Scoring(0.5), parts)
    assert calls == [3]


def test_buffers_of_several_kinds_take_one_call(calls: list[int]) -> None:
    parts = [part(index, 9, kv_heads=2, dims=(8, 8), room=room) for index, room in enumerate((0, 5, 0, 5, 7))]
    check(4, tokens_at([9] * 6), Scoring(0.5), parts)
    assert calls == [6]


def test_buffers_hold_rows_of_several_sequences(calls: list[int]) -> None:
    """As those of the offload engine do: token by token, keys and values of all heads, with room between sequences."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        lengths = [random.choice((0, 1, random.randint(2, 70))) for _ in range(6)] + [9]
        rows = torch.randn(sum(lengths) + 3 * len(lengths), 2 * 2 * 16).to(dtype)
        keys, values = rows.unflatten(1, (2, 2, 16)).permute(1, 2, 0, 3)
        parts, first = list[KVPart](), 0
        for index, length in enumerate(lengths):
            own, where = slice(first, first + length), np.arange(length)
            parts.append(KVPart(index, keys[:, own], values[:, own], where, where))
            first += length + 3
        check(6, tokens_at(lengths), Scoring(0.3), parts)
    assert calls == [7] * 3


def test_what_is_more_than_that_goes_block_by_block(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kind: dict[str, Any] = {"kv_heads": 2, "dims": (8, 8)}
    parts, tokens, plain = [part(index, 5, **kind) for index in range(3)], tokens_at([4, 4, 4]), Scoring(1.0)

    def sequences(
        scoring: Scoring = plain, tokens: TokenBlock = tokens, heads: int = 6, dtype: torch.dtype = torch.float32
    ) -> list[int]:
        """Those of the call for several; each of the others is a call, or several, of one."""
        calls.clear()
        queries = torch.randn(heads, len(tokens), 8, dtype=dtype)
        own = [each._replace(k_KSD=each.k_KSD.to(dtype), v_KSD=each.v_KSD.to(dtype)) for each in parts]
        found = attend_rows(queries, tokens, scoring, 2, 8, own)
        several = [count for count in calls if count > 1]
        expected = PackedAttention(queries.double(), tokens, scoring, 8)
        for each in own:
            expected.add(each._replace(k_KSD=each.k_KSD.double(), v_KSD=each.v_KSD.double()))
        for one, other in zip(found, expected.result(), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
        return several

    assert sequences() == [3]
    # A window hides keys of all, of one some are yet to come.
    assert sequences(Scoring(1.0, window=4)) == [] and sequences(tokens=tokens_at([4, 3, 4])) == [2]
    assert sequences(Scoring(1.0, softcap=5.0)) == sequences(Scoring(1.0, alibi_slopes=torch.ones(6))) == []
    assert sequences(dtype=torch.float64) == sequences(heads=2 * 200) == []
    assert attend_rows(torch.randn(6, 1, 8), tokens_at([9], sequences=[7]), plain, 2, 8, parts)[1].isneginf().all()
    turned = parts[0]._replace(k_KSD=torch.randn(2, 8, 5).transpose(1, 2))
    parts[0] = turned
    assert sequences() == [2]
    monkeypatch.setattr(together, "load_kernel", lambda: (None, "no compiler"))
    assert sequences() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 90])
def test_single_rows_beside_prompts(dtype: torch.dtype, window: int | None, calls: list[int]) -> None:
    """Of several sequences some decode while others read: as each by itself, with one call for those that decode."""
    for _ in range(4):
        scoring, parts = Scoring(0.2, window=window), list[KVPart]()
        sequences, slots = list[int](), list[int]()
        rows = random.sample([1, 1, random.randint(2, 70), 0, random.randint(2, 20), 1], 6)
        for sequence, new in enumerate(rows):
            past = random.randint(1, 80)
            sequences, slots = sequences + [sequence] * new, slots + list(range(past, past + new))
            middle = random.randint(1, past)
            kind = {"kv_heads": 2, "dims": (64, 64), "dtype": dtype}
            parts += [part(sequence, middle, **kind), part(sequence, past + new - middle, first=middle, **kind)]
        where = np.array(slots)
        tokens = TokenBlock(np.array(sequences), where, where, len(rows))
        queries = torch.randn(len(tokens), 4, 64).to(dtype).transpose(0, 1)
        expected = PackedAttention(queries.double(), tokens, scoring, 64)
        for each in parts:
            expected.add(each._replace(k_KSD=each.k_KSD.double(), v_KSD=each.v_KSD.double()))
        calls.clear()
        found = attend_rows(queries, tokens, scoring, 2, 64, parts)
        # A window may hide some keys of those that decode.
        assert window is not None or 3 in calls
        bound = ROUNDED_TOLERANCE if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found[0].double(), expected.result()[0], rtol=bound, atol=bound)
        torch.testing.assert_close(found[1].double(), expected.result()[1], rtol=1e-5, atol=1e-5)


def test_one_row_alone_is_not_set_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_at([5, 6, 9], [0, 0, 1])
    parts = [part(sequence, 10, kv_heads=1, dims=(16, 16)) for sequence in range(2)]
    monkeypatch.setattr(KVPart, "runs", lambda *_: pytest.fail("it was asked where rows lie"))
    attend_rows(torch.randn(2, 3, 16), tokens, Scoring(0.3), 1, 16, parts)
