"""Shards cover every token once, stay balanced over turns, and keep packed rows in order."""

from itertools import pairwise

import numpy as np
import pytest

from megakv.distributed.layouts import (
    SHORT,
    UNEVEN_SHARE,
    balanced,
    by_sequence,
    contiguous,
    on_last_rank,
    replicated,
    round_robin,
)
from megakv.distributed.sharding import Layout, TokenBlock, chunk_bounds, new_tokens, pieces


def block(lengths: list[int], first_slot: int = 0) -> TokenBlock:
    mask = np.zeros((len(lengths), max([*lengths, 1])), dtype=bool)
    for row, length in enumerate(lengths):
        mask[row, mask.shape[1] - length :] = True
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return new_tokens(mask, positions, first_slot)


def check_cover(new: TokenBlock, layout: Layout) -> None:
    stored = [list(zip(b.sequence, b.slot, b.position, strict=True)) for b in layout.stored]
    flat = sorted(token for rank in stored for token in rank)
    assert flat == sorted(zip(new.sequence, new.slot, new.position, strict=True))
    for tokens in layout.tokens:
        keys = tokens.sequence * 10**6 + tokens.slot
        assert (np.diff(keys) > 0).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("lengths", [[1], [2], [3], [7], [64], [127], [1000], [5, 41, 1], [0, 9], [16, 16, 17]])
def test_every_scheme_covers_every_token_once(size: int, lengths: list[int]) -> None:
    new = block(lengths)
    for layout in (balanced(new, size), round_robin(new, size), replicated(new, size)):
        check_cover(new, layout)
        counts = np.array([[(b.sequence == row).sum() for row in range(new.batch)] for b in layout.stored])
        assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()


def test_balanced_takes_chunks_i_and_its_mirror() -> None:
    layout = balanced(block([16]), 4)
    assert [list(b.slot) for b in layout.tokens] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


def test_balanced_shares_causal_work_evenly() -> None:
    layout = balanced(block([4096]), 4)
    work = [int((b.slot + 1).sum()) for b in layout.tokens]
    assert max(work) == min(work)


def test_turns_and_decoding_keep_ranks_within_one_token() -> None:
    rng = np.random.default_rng(3)
    for size in (2, 3, 4, 7):
        held = np.zeros((size, 2), dtype=np.int64)
        slot = 0
        for _ in range(60):
            length = int(rng.choice([1, 1, 1, 2, 3, 17, 100]))
            new = block([length, length], slot)
            scheme = round_robin if length < 2 * size else balanced
            layout = scheme(new, size, held)
            held = held + np.array([[(b.sequence == row).sum() for row in range(2)] for b in layout.stored])
            slot += length
            assert (held.max(axis=0) - held.min(axis=0) <= 1).all()


def test_one_step_of_decoding_spreads_over_ranks() -> None:
    layout = round_robin(block([1] * 8, 100), 4, np.full((4, 8), 25, dtype=np.int64))
    assert [len(b) for b in layout.tokens] == [2, 2, 2, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 32])
def test_short_prompts_of_others_are_whole_where_no_rank_is_left_behind(size: int) -> None:
    rng = np.random.default_rng()
    for _ in range(50):
        lengths = rng.choice([0, 1, 2, 5, 60, 64, 256, 257, 1000], size=rng.integers(1, 12)).tolist()
        held = rng.integers(0, 2, (size, len(lengths))) * rng.integers(0, 50, len(lengths))
        new = block(lengths, int(held.max(initial=0)) * size)
        layout = by_sequence(new, size, held)
        check_cover(new, layout)
        counts = np.array([[(b.sequence == row).sum() for row in range(new.batch)] for b in layout.stored])
        whole = (np.count_nonzero(counts, axis=0) == 1) & (np.array(lengths) > 1)
        if size > 1:
            assert not whole[(np.array(lengths) > SHORT) | held.any(0) & (np.array(lengths) >= 2 * size)].any()
        tokens = counts.sum(1)
        # Those that are divided differ by one token each.
        assert tokens.max() - tokens.min() <= len(new) // (size * UNEVEN_SHARE) + len(lengths)
        assert not layout.apart or (whole | (np.array(lengths) <= 1)).all()


@pytest.mark.parametrize(
    ("lengths", "size", "tokens", "apart"),
    [
        ([64] * 16, 2, [512, 512], True),
        ([64] * 3, 2, [96, 96], False),
        ([100, 60, 40], 2, [100, 100], True),
        ([64], 2, [32, 32], False),
        ([30, 31, 30], 3, [31, 30, 30], True),
        ([300, 300], 2, [300, 300], False),
        ([64] * 17, 8, [136] * 8, False),
        ([100, 1948], 8, [257] * 4 + [255] * 4, False),
        ([64] * 31, 32, [62] * 32, False),
    ],
)
def test_which_prompts_are_whole(lengths: list[int], size: int, tokens: list[int], apart: bool) -> None:
    layout = by_sequence(block(lengths), size)
    assert [len(b) for b in layout.tokens] == tokens and layout.apart == apart


def test_contiguous_uneven() -> None:
    layout = contiguous(block([9]), [[4, 3, 2]])
    assert [list(b.slot) for b in layout.tokens] == [[0, 1, 2, 3], [4, 5, 6], [7, 8]]
    check_cover(block([9, 2]), contiguous(block([9, 2]), [[9, 0, 0], [0, 1, 1]]))


def test_gathered_on_the_last_rank() -> None:
    new = block([9, 2])
    layout = contiguous(new, [[4, 3, 2], [0, 2, 0]], gathered=True)
    check_cover(new, layout)
    assert [len(b) for b in layout.tokens] == [4, 5, 2] and [len(b) for b in layout.stored] == [0, 0, 11]
    assert layout.gathered and not contiguous(new, [[4, 3, 2], [0, 2, 0]]).gathered


def test_on_last_rank() -> None:
    new = block([1, 1, 1])
    layout = on_last_rank(new, 3)
    assert [len(b) for b in layout.tokens] == [len(b) for b in layout.stored] == [0, 0, 3]
    check_cover(new, layout)


@pytest.mark.parametrize(
    ("tokens", "longest", "sizes"),
    [(0, 5, []), (1, 5, [1]), (5, 5, [5]), (6, 5, [3, 3]), (11, 5, [4, 4, 3]), (3, 1, [1, 1, 1])],
)
def test_pieces_are_few_and_even(tokens: int, longest: int, sizes: list[int]) -> None:
    found = pieces(tokens, longest)
    assert [stop - start for start, stop in found] == sizes
    assert all(stop == start for (_, stop), (start, _) in pairwise([(0, 0), *found]))


@pytest.mark.parametrize("sizes", [[4, 3, 3], [10, -1, 0], [0, 0, 0]])
def test_contiguous_refuses_partitions_that_do_not_sum(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="must be 3 numbers >= 0 that sum to its 9 new tokens"):
        contiguous(block([9]), [sizes])


def test_chunk_bounds_of_fewer_tokens_than_chunks() -> None:
    assert chunk_bounds(3, 8).tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]


def test_padding_is_never_packed() -> None:
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=bool)
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    new = new_tokens(mask, positions, 10)
    assert new.sequence.tolist() == [0, 0, 1, 1, 1]
    assert new.slot.tolist() == [12, 13, 10, 11, 12]
    assert new.position.tolist() == [0, 1, 0, 1, 2]
    assert new.run(2) == slice(5, 5)
