"""Partitions sum to the prompt, whatever they are made from, and a user's are checked."""

import math
import random

import pytest

from megakv.base.partition import check_partition, even, explicit, from_fractions, to_fractions


@pytest.mark.parametrize("trial", range(20))
def test_even_parts_differ_by_one_at_most(trial: int) -> None:
    tokens, size = random.randint(0, 10**6), random.randint(1, 64)
    parts = even(tokens, size)
    assert len(parts) == size and sum(parts) == tokens
    assert max(parts) - min(parts) <= 1 and list(parts) == sorted(parts, reverse=True)


@pytest.mark.parametrize("trial", range(50))
def test_fractions_are_rounded_to_the_nearest_whole_tokens(trial: int) -> None:
    tokens, size = random.choice((0, 1, 2, random.randint(3, 10**6))), random.randint(1, 64)
    weights = [random.choice((0.0, random.random())) for _ in range(size)]
    weights[random.randrange(size)] = 1.0
    total = math.fsum(weights)
    parts = from_fractions([weight / total for weight in weights], tokens)
    assert sum(parts) == tokens and min(parts) >= 0
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - weight / total * tokens) < 1 + 1e-6
    # Only ratios count.
    assert from_fractions(weights, tokens) == parts


@pytest.mark.parametrize("trial", range(50))
def test_shares_of_a_partition_give_it_back(trial: int) -> None:
    parts = tuple(random.randint(0, 10**5) for _ in range(random.randint(1, 32)))
    parts = (*parts, random.randint(1, 9))
    assert from_fractions(to_fractions(parts), sum(parts)) == parts


def test_equal_shares_round_up_from_the_first_rank() -> None:
    # 1/49 x 49 is below 1 in floating point: every rank is left over.
    assert from_fractions([1 / 49] * 49, 49) == (1,) * 49
    assert from_fractions([0.25] * 4, 6) == (2, 2, 1, 1)


def test_users_give_fractions_or_counts() -> None:
    assert explicit([0.5, 0.3, 0.2], 10, 3) == (5, 3, 2)
    assert explicit([5, 3, 2], 10, 3) == (5, 3, 2)
    assert explicit([0, 0, 7], 7, 3) == (0, 0, 7)
    assert explicit([1, 0], 12, 2) == (12, 0)
    assert explicit([0.0, 1.0], 12, 2) == (0, 12)
    assert explicit([1 / 3, 1 / 3, 1 / 3 + 5e-7], 9, 3) == (3, 3, 3)
    assert check_partition([4, 5], 2) is False and check_partition([0.4, 0.6], 2) is True


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([5, 5], "[5, 5] has 2 parts: allowed: 3, one for each of the 3 context-parallel ranks"),
        ([], "[] has 0 parts"),
        ([0.7, 0.5, -0.2], "[0.7, 0.5, -0.2]: allowed: numbers of 0 or more"),
        ([11, -1, 0], "[11, -1, 0]: allowed: numbers of 0 or more"),
        ([math.nan, 0.5, 0.5], "allowed: numbers of 0 or more"),
        ([math.inf, 0.5, 0.5], "allowed: numbers of 0 or more"),
        ([True, 0, 0], "allowed: numbers of 0 or more"),
        (["5", 3, 2], "allowed: numbers of 0 or more"),
        ([0.5, 0.3, 0.1], "sums to 0.9: allowed: fractions that sum to 1, or whole token counts"),
        ([5.0, 3.0, 2.0], "sums to 10: allowed: fractions that sum to 1, or whole token counts"),
        ([0, 0, 0], "sums to 0: allowed"),
        ([5, 3, 3], "sums to 11 tokens, but a sequence of the prompt has 10 new ones"),
    ],
)
def test_what_partitions_no_prompt_is_refused(partition: list[float], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        explicit(partition, 10, 3)
    assert str(caught.value).startswith("megakv.runahead.partition = [") and message in str(caught.value)
