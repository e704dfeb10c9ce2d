"""Visibility blocks against the brute-force bool matrix."""

import numpy as np
import pytest

from megakv.attention.visibility import MASKED_PAIRS, MASKED_ROWS, Block, plan_blocks, visible_pairs


def brute_force(q_slots, k_slots, window):
    return np.array(
        [[k <= q and (window is None or k > q - window) for k in k_slots] for q in q_slots], dtype=bool
    ).reshape(len(q_slots), len(k_slots))


def coverage(blocks, q_slots, k_slots, window):
    """How often the blocks compute each pair, and checks of what each kind promises."""
    times = np.zeros((len(q_slots), len(k_slots)), dtype=int)
    for q0, q1, k0, k1, kind in blocks:
        assert 0 <= q0 < q1 <= len(q_slots) and 0 <= k0 < k1 <= len(k_slots)
        if kind == "full":
            times[q0:q1, k0:k1] += 1
        elif kind == "causal":
            assert np.array_equal(q_slots[q0:q1], k_slots[k0:k1])
            times[q0:q1, k0:k1] += np.tri(q1 - q0, dtype=int)
        else:
            assert q1 - q0 <= MASKED_ROWS and (q1 - q0) * (k1 - k0) <= max(MASKED_PAIRS, k1 - k0)
            times[q0:q1, k0:k1] += visible_pairs(q_slots[q0:q1], k_slots[k0:k1], window)
    return times


def chunk(index, size):
    return np.arange(index * size, (index + 1) * size)


def zigzag(rank, ranks, size):
    return np.concatenate([chunk(rank, size), chunk(2 * ranks - 1 - rank, size)])


def random_slots(rng):
    """Ascending slots of one of the shapes that shards take, or of none."""
    shape = rng.integers(6)
    start, length, size = rng.integers(0, 60), rng.integers(0, 150), rng.integers(1, 100)
    if shape == 0:
        return np.arange(start, start + length)
    if shape == 1:
        return np.flatnonzero(rng.random(300) < rng.random())
    if shape == 2:
        return np.arange(start, 300, rng.integers(1, 6))
    if shape == 3:
        return zigzag(rng.integers(3), 3, size)
    if shape == 4:
        return np.unique(np.concatenate([chunk(rng.integers(5), size) for _ in range(3)]))
    return np.concatenate([np.arange(start), np.arange(start, start + 150, 4)])


@pytest.mark.parametrize("seed", range(8))
def test_every_visible_pair_is_covered_once(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        q_slots, k_slots = random_slots(rng), random_slots(rng)
        if rng.random() < 0.2:
            k_slots = q_slots
        window = None if rng.random() < 0.4 else int(rng.choice([1, 2, 3, 16, 100, 256, 1000]))
        blocks = plan_blocks(q_slots, k_slots, window)
        expected = brute_force(q_slots, k_slots, window)
        assert np.array_equal(visible_pairs(q_slots, k_slots, window), expected)
        assert np.array_equal(coverage(blocks, q_slots, k_slots, window), expected.astype(int))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [None, 5, 300, 1500])
def test_long_slots_are_tiled_exactly(seed, window):
    rng = np.random.default_rng(seed)
    q_slots = np.flatnonzero(rng.random(6000) < 0.4)
    k_slots = q_slots if seed == 0 else np.flatnonzero(rng.random(5000) < 0.6)
    if seed == 3:
        q_slots, k_slots = np.arange(3000, 6000), np.arange(1000, 5000)
    blocks = plan_blocks(q_slots, k_slots, window)
    expected = visible_pairs(q_slots, k_slots, window)
    assert np.array_equal(coverage(blocks, q_slots, k_slots, window), expected)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zigzag_takes_one_block(size, ranks):
    for i in range(ranks):
        for j in range(ranks):
            blocks = plan_blocks(zigzag(i, ranks, size), zigzag(j, ranks, size))
            if j < i:
                assert blocks == [Block(0, 2 * size, 0, size, "full")]
            elif j > i:
                assert blocks == [Block(size, 2 * size, 0, 2 * size, "full")]
            elif size == 1:
                assert len(blocks) == 1
            else:
                assert blocks == [Block(0, 2 * size, 0, 2 * size, "causal")]


def test_own_tokens_after_cached_ones_take_a_full_and_a_causal_block():
    q_slots = zigzag(1, 4, 50) + 1000
    k_slots = np.concatenate([np.arange(3, 900, 7), q_slots])
    cached = len(k_slots) - 100
    assert plan_blocks(q_slots, k_slots) == [
        Block(0, 100, 0, cached, "full"),
        Block(0, 100, cached, cached + 100, "causal"),
    ]


def test_decode_row_takes_one_block():
    k_slots = np.arange(0, 4000, 3)
    assert plan_blocks(np.array([5000]), k_slots) == [Block(0, 1, 0, len(k_slots), "full")]
    assert plan_blocks(np.array([30]), k_slots) == [Block(0, 1, 0, 11, "full")]
    assert plan_blocks(np.array([3000]), k_slots, window=90) == [Block(0, 1, 971, 1001, "full")]


def test_nothing_visible_gives_no_block():
    empty = np.zeros(0, dtype=np.int64)
    assert plan_blocks(empty, np.arange(3)) == []
    assert plan_blocks(np.arange(3), empty) == []
    assert plan_blocks(np.arange(3), np.arange(3, 9)) == []
    assert plan_blocks(np.arange(50, 60), np.arange(40), window=10) == []


@pytest.mark.parametrize("window", [16, 256, 1000, 4096])
def test_window_work_is_linear_in_rows(window):
    q_slots = np.arange(20_000)
    blocks = plan_blocks(q_slots, q_slots, window)
    pairs = sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1, _ in blocks)
    assert pairs <= len(q_slots) * (window + 2 * max(256, min(window, 1024)))
    assert max(q1 - q0 for q0, q1, _, _, kind in blocks if kind == "masked") <= MASKED_ROWS


def test_few_blocks_when_slots_interleave():
    # Round-robin decode tokens of two ranks after a long prompt.
    k_slots = np.concatenate([np.arange(0, 100_000, 2), 100_000 + np.arange(0, 4096, 2)])
    q_slots = 100_000 + np.arange(1, 4096, 2)
    blocks = plan_blocks(q_slots, k_slots)
    assert len(blocks) <= 4
    masked = sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1, kind in blocks if kind == "masked")
    assert masked <= 2 * 1024 * 1024
