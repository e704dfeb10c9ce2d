"""A row of each of several sequences over heads that keep tokens of their own: one call does what one for each does."""

import random

import numpy as np
import pytest
import torch

from megakv.attention.compiled import DecodeKernel
from megakv.attention.partial import KVPart, PackedAttention, Part
from megakv.attention.reference import Scoring
from megakv.attention.together import attend_rows
from megakv.attention.varlen import efficient, flash
from megakv.cache import together
from megakv.cache.dense import DenseStore
from megakv.cache.joined_bodies import JoinedBodies, JoinedBody, join, stretches
from megakv.cache.ragged import RaggedStore, Span
from megakv.cache.ragged_attention import RaggedPart
from megakv.cache.ragged_body import BodyIndex, RaggedBody
from megakv.cache.together import attend_heads
from megakv.distributed.sharding import TokenBlock
from tests.unit.attention.test_varlen import kernels  # noqa: F401  CUDA's kernels as loops

DIM = 16


def random_body(kv_heads: int, length: int, dtype: torch.dtype, value_dim: int) -> RaggedBody | None:
    """Of heads some keep nothing; None where all do."""
    keep = torch.rand(kv_heads, length) < torch.rand(kv_heads, 1).clamp(0.1) * (torch.rand(kv_heads, 1) < 0.8)
    tokens = (torch.randn(kv_heads, length, dim).to(dtype) for dim in (DIM, value_dim))
    return RaggedBody.kept(*tokens, keep, np.arange(length))


def random_parts(batch: int, kv_heads: int, dtype: torch.dtype, value_dim: int = DIM) -> tuple[list[Part], int]:
    """Of every sequence up to two bodies, and a tail or none; and a slot behind them all."""
    parts: list[Part] = []
    for sequence in range(batch):
        first = 0
        for _ in range(random.choice((1, 1, 2))):
            length = random.randint(1, 900)
            slots = np.arange(first + length)
            body = random_body(kv_heads, length, dtype, value_dim)
            if body is not None:
                index = BodyIndex.of(body.counts, body.index.rows + first)
                parts.append(RaggedPart(sequence, RaggedBody(index, body.k_nD, body.v_nD), slots, slots))
            first += length
        if rows := random.choice((0, 1, random.randint(2, 60))):
            # As of a buffer that grows.
            keys, values = (torch.randn(kv_heads, 70, dim).to(dtype)[:, :rows] for dim in (DIM, value_dim))
            parts.append(KVPart(sequence, keys, values, np.arange(first, first + rows), np.arange(first, first + rows)))
    return parts, 2000


def tokens_of(sequences: list[int], slot: int) -> TokenBlock:
    every = np.full(len(sequences), slot)
    return TokenBlock(np.array(sequences), every, every, max(sequences) + 1)


def by_sequence(q: torch.Tensor, tokens: TokenBlock, scoring: Scoring, parts: list[Part], value_dim: int = DIM):
    attention = PackedAttention(q, tokens, scoring, value_dim)
    for part in parts:
        attention.add(part)
    return attention.result()


def joined(parts: list[Part]) -> list[Part]:
    """The same with bodies in one memory."""
    bodies = [part.body for part in parts if isinstance(part, RaggedPart)]
    memory = JoinedBodies(bodies)
    places = iter(JoinedBody(body.index, memory, place) for place, body in enumerate(bodies))
    return [
        RaggedPart(part.sequence, next(places), part.slots, part.positions) if isinstance(part, RaggedPart) else part
        for part in parts
    ]


def check(found, expected, bound: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("batch", range(1, 6))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_one_call_on_processors(monkeypatch, batch: int, dtype: torch.dtype, bound: float) -> None:
    kv_heads, group, value_dim = random.randint(1, 5), random.choice((1, 3, 8)), random.choice((DIM, 24))
    parts, slot = random_parts(batch, kv_heads, dtype, value_dim)
    sequences = sorted(random.sample(range(batch), random.randint(1, batch)))
    q, tokens = torch.randn(kv_heads * group, len(sequences), DIM).to(dtype), tokens_of(sequences, slot)
    calls: list[int] = []
    ready = DecodeKernel.ready

    def counted(self: DecodeKernel, q: torch.Tensor, *given) -> object:
        calls.append(len(q))
        return ready(self, q, *given)

    monkeypatch.setattr(DecodeKernel, "ready", counted)
    found = attend_rows(q, tokens, Scoring(0.3), kv_heads, value_dim, parts)
    ragged = any(isinstance(part, RaggedPart) and part.sequence in sequences for part in parts)
    assert calls == [len(sequences) * (kv_heads if ragged else 1)]
    check(found, by_sequence(q, tokens, Scoring(0.3), parts, value_dim), bound)


@pytest.mark.parametrize("batch", range(1, 6))
@pytest.mark.parametrize(
    ("kernel", "dtype", "bound"), [(flash, torch.bfloat16, 2e-2), (efficient, torch.float32, 1e-5)]
)
@pytest.mark.parametrize("in_one", [True, False])
def test_one_call_on_cuda(monkeypatch, batch: int, kernel, dtype: torch.dtype, bound: float, in_one: bool) -> None:
    calls: list[int] = []

    def counted(q, k, v, runs, scale):
        calls.append(len(runs.counts))
        return kernel(q, k, v, runs, scale)

    monkeypatch.setattr(together, "select_varlen", lambda *given: counted)
    kv_heads, group = random.randint(1, 5), random.choice((1, 3, 8))
    parts, slot = random_parts(batch, kv_heads, dtype)
    sequences = list(range(batch)) if in_one else sorted(random.sample(range(batch), random.randint(1, batch)))
    q, tokens = torch.randn(kv_heads * group, len(sequences), DIM).to(dtype), tokens_of(sequences, slot)
    own = [part for part in parts if part.sequence in sequences]
    bodies = [part for part in own if isinstance(part, RaggedPart)]
    tails = len(own) - len(bodies)
    if not bodies:
        return
    found = attend_heads(q, tokens, Scoring(0.3), joined(parts) if in_one else parts)
    assert found is not None and not found[2]
    check(found[:2], by_sequence(q, tokens, Scoring(0.3), parts), bound)
    each = [kv_heads * len(bodies)] if in_one else [kv_heads] * len(bodies)
    assert calls == each + [kv_heads * tails] * (tails > 0)


def test_what_a_kernel_does_not_take_is_left(monkeypatch) -> None:
    parts, slot = random_parts(4, 3, torch.float32)
    q = torch.randn(6, 4, DIM)
    tokens = tokens_of([0, 1, 2, 3], slot)
    assert attend_heads(q, tokens, Scoring(0.3, softcap=20.0), parts) is None
    # Some of them are outside of a window in part.
    scoring = Scoring(0.3, window=slot - 5)
    found = attend_heads(q, tokens, scoring, parts)
    rest = parts if found is None else found[2]
    assert rest and (found is None or all(part.slots[0] <= 5 for part in rest))
    attention = PackedAttention(q, tokens, scoring, DIM)
    for part in rest:
        attention.add(part)
    if found is not None:
        attention.merge(*found[:2])
    check(attention.result(), by_sequence(q, tokens, scoring, parts), 1e-5)


def test_bodies_come_to_one_memory_when_they_stay(monkeypatch) -> None:
    # A device whose tensors have no contents is no processor.
    def body(tokens: int) -> RaggedBody:
        return RaggedBody.in_block(
            BodyIndex.of(np.array([tokens, 0]), np.arange(tokens)), torch.empty(tokens, 24, device="meta"), DIM
        )

    store = RaggedStore(3, DenseStore(3))
    for sequence, tokens in ((0, 5), (2, 7)):
        store.add_span(sequence, Span(0, 9, body(tokens)))
    apart = [*store.bodies(0), *store.bodies(2)]
    store.begin(complete=False)
    assert [*store.bodies(0), *store.bodies(2)] == apart
    size = store.nbytes()
    store.begin(complete=False)
    first, last = *store.bodies(0), *store.bodies(2)
    assert stretches([first, last]) == [(0, 2)] and stretches([last, first]) == [(0, 1), (1, 2)]
    assert isinstance(first, JoinedBody) and first.joined.k_nD.shape == (12, DIM) and store.nbytes() == size
    store.begin(complete=False)
    assert (*store.bodies(0), *store.bodies(2)) == (first, last)
    # Without one of them it would be memory that nobody reads.
    store.add_span(1, Span(0, 9, body(4)))
    store.crop(0, 0)
    for _ in range(2):
        store.begin(complete=False)
    assert stretches([*store.bodies(1), *store.bodies(2)]) == [(0, 2)]
    # What sequences share stays shared.
    shared = body(3)
    assert join([shared, shared]) is None and join([shared]) is None


def test_joined_bodies_are_copied_alone() -> None:
    bodies = [b for b in (random_body(3, 50, torch.float32, 24) for _ in range(9)) if b is not None][:2]
    memory = JoinedBodies(bodies)
    one = JoinedBody(bodies[1].index, memory, 1)
    function, arguments = one.__reduce__()
    copy = function(*arguments)
    assert (
        type(copy) is RaggedBody and torch.equal(copy.k_nD, bodies[1].k_nD) and torch.equal(copy.v_nD, bodies[1].v_nD)
    )
    assert copy.block.untyped_storage().nbytes() == one.block.nbytes == bodies[1].block.nbytes
