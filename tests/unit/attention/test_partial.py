"""Partial attention over shards, windows and interleaved slots against the whole computation."""

import numpy as np
import pytest
import torch

from megakv.attention.partial import PartialAttention, Scoring
from megakv.attention.prefill import ROUNDED_TOLERANCE, load_prefill
from tests.reference import reference_attention


def qkv(rng, length, heads=4, kv_heads=2, dim=16, dtype=torch.float32):
    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    return normal(length, heads, dim).transpose(0, 1), normal(kv_heads, length, dim), normal(kv_heads, length, dim)


def assert_agrees(actual, expected, tolerance=2e-6, rounded=False):
    bound = ROUNDED_TOLERANCE if rounded else tolerance
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=bound, atol=bound)
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=tolerance, atol=2 * tolerance)


def zigzag_slots(length, ranks):
    """Balanced chunks of any length: rank i takes chunks i and 2N-1-i, some of which may be empty."""
    chunks = np.array_split(np.arange(length), 2 * ranks)
    return [np.concatenate([chunks[i], chunks[2 * ranks - 1 - i]]) for i in range(ranks)]


SCORINGS = {
    "plain": Scoring(0.25),
    "window": Scoring(0.25, window=7),
    "softcap": Scoring(0.25, softcap=3.0),
    "alibi": Scoring(0.25, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "all": Scoring(0.3, window=11, softcap=2.0, alibi_slopes=torch.tensor([0.7, 0.25, 0.125, 0.01])),
}


@pytest.mark.drawn(10)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS.keys())
@pytest.mark.parametrize("ranks", range(1, 6))
def test_zigzag_ring_equals_the_whole(ranks, scoring):
    rng = np.random.default_rng(ranks)
    for length in range(1, 41):
        q, k, v = qkv(rng, length)
        positions = np.arange(length) - 3
        expected = reference_attention(q, k, v, np.arange(length), np.arange(length), scoring, positions)
        shards = zigzag_slots(length, ranks)
        for own in shards:
            partial = PartialAttention(q[:, own], own, scoring)
            for other in rng.permutation(ranks):
                slots = shards[other]
                partial.add(k[:, slots], v[:, slots], slots, positions[slots])
            assert partial.out.shape == (4, len(own), 16) and partial.lse.shape == (4, len(own))
            assert_agrees((partial.out, partial.lse), (expected[0][:, own], expected[1][:, own]))


@pytest.mark.drawn(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize("window", [None, 40, 300])
def test_interleaved_parts_in_any_order(dtype, kv_heads, window):
    rng = np.random.default_rng(kv_heads)
    length = 777
    q, k, v = qkv(rng, length, heads=8, kv_heads=kv_heads, dim=64, dtype=dtype)
    owner = rng.integers(0, 5, length)
    owner[: length // 2] = np.sort(owner[: length // 2])
    scoring = Scoring(0.125, window=window)
    rows = np.flatnonzero(rng.random(length) < 0.6)
    expected = reference_attention(q[:, rows], k, v, rows, np.arange(length), scoring)
    partial = PartialAttention(q[:, rows], rows, scoring)
    for rank in rng.permutation(6):
        slots = np.flatnonzero(owner == rank)
        partial.add(k[:, slots], v[:, slots], slots)
    assert partial.out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    prefill, _ = load_prefill()
    rounded = prefill is not None and prefill.rounds(dtype)
    assert_agrees((partial.out, partial.lse), expected, 1e-13 if dtype == torch.float64 else 2e-6, rounded)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("window", [1, 100, 256, 1200])
def test_long_windows(window):
    rng = np.random.default_rng(window)
    q, k, v = qkv(rng, 2500, heads=2, kv_heads=1)
    slots = np.arange(2500)
    expected = reference_attention(q, k, v, slots, slots, Scoring(0.25, window=window))
    partial = PartialAttention(q, slots, Scoring(0.25, window=window))
    partial.add(k, v, slots)
    assert_agrees((partial.out, partial.lse), expected)


def test_nothing_to_attend():
    empty = np.zeros(0, dtype=np.int64)
    q, k, v = qkv(np.random.default_rng(0), 5)
    slots = np.arange(5)
    partial = PartialAttention(q, slots, Scoring(1.0), value_dim=24)
    assert partial.out.shape == (4, 5, 24)
    partial = PartialAttention(q, slots, Scoring(1.0))
    partial.add(k[:, :0], v[:, :0], empty)
    partial.add(k, v, slots + 5)
    assert torch.equal(partial.out, torch.zeros(4, 5, 16)) and partial.lse.eq(-torch.inf).all()
    partial.add(k, v, slots)
    assert_agrees((partial.out, partial.lse), reference_attention(q, k, v, slots, slots, Scoring(1.0)))
    none = PartialAttention(q[:, :0], empty, Scoring(1.0))
    none.add(k, v, slots)
    assert none.out.shape == (4, 0, 16) and none.lse.shape == (4, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gap", [89.0, 1e4])
def test_large_score_gaps_between_parts(dtype, gap):
    rng = np.random.default_rng(1)
    q, k, v = qkv(rng, 30, dtype=dtype)
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, 10:20, 0] = gap * 4
    slots = np.arange(30)
    expected = reference_attention(q, k, v, slots, slots, Scoring(0.25))
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        partial = PartialAttention(q, slots, Scoring(0.25))
        for part in order:
            run = slice(10 * part, 10 * part + 10)
            partial.add(k[:, run], v[:, run], slots[run])
        tolerance = 2e-2 if dtype == torch.bfloat16 else max(4e-6, gap * 2e-7)
        assert_agrees((partial.out, partial.lse), expected, tolerance)


def test_accumulators_do_not_alias_the_inputs():
    q, k, v = qkv(np.random.default_rng(0), 1, heads=2, kv_heads=2)
    before = v.clone()
    partial = PartialAttention(q, np.array([5]), Scoring(1.0))
    partial.add(k, v, np.array([1]))
    partial.add(k, v + 1, np.array([2]))
    assert torch.equal(v, before)


def rms(error):
    return error.double().square().mean().sqrt().item()


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_parts_are_as_good_as_one_call(seed, spread):
    rng = np.random.default_rng(seed)
    q, k, v = qkv(rng, 512, heads=8, dim=64, dtype=torch.bfloat16)
    q = q * spread
    slots = np.arange(512)
    scoring = Scoring(0.125)
    expected, _ = reference_attention(q, k, v, slots, slots, scoring)
    single = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=0.125, enable_gqa=True
    )[0]
    partial = PartialAttention(q, slots, scoring)
    for part in rng.permutation(8):
        run = slice(64 * part, 64 * part + 64)
        partial.add(k[:, run], v[:, run], slots[run])
    merged = partial.out.bfloat16()
    assert rms(merged - expected) <= 1.1 * rms(single - expected)
