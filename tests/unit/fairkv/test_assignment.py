"""Best-effort assignment against the optimum."""

import numpy as np
import pytest

from megakv.fairkv.assignment import divide_ranks, exchanged, group_heads, lower_bound
from megakv.fairkv.copying import map_layer
from megakv.fairkv.limits import CopyLimits
from tests.unit.fairkv.instances import RANDOM, budgets
from tests.unit.fairkv.oracles import best_layer


@pytest.mark.parametrize(("count", "most"), [(100, 7), pytest.param(500, 10, marks=pytest.mark.full)])
def test_without_copies_equal_to_the_optimum(count: int, most: int) -> None:
    """FairKV-NoDP on random instances is what scipy's MILP proves to be the best."""
    for _ in range(count):
        size = int(RANDOM.integers(2, min(most, 8) + 1))
        weights = budgets(int(RANDOM.integers(size, most + 1)))
        limits = CopyLimits(size)
        best, bound = best_layer(weights, limits)
        for split in ("free", "even"):
            found = map_layer(weights, limits, split)
            assert bound * (1 - 1e-6) <= found.slowest <= best * (1 + 1e-6), (weights, size, split)
            assert found.bound == pytest.approx(found.slowest, rel=1e-6)
            assert found.mapping.copies == 0
            held = {ranks[0] for ranks in found.mapping.ranks}
            assert held == set(range(size)), "a rank without a head"
            assert max(found.mapping.loads(weights, size)) == pytest.approx(found.slowest)


def test_uneven_counts_of_heads() -> None:
    found = map_layer([9, 1, 1, 1, 1, 1, 1, 1], CopyLimits(2))
    assert sorted(np.bincount([ranks[0] for ranks in found.mapping.ranks])) == [1, 7]
    assert found.slowest == 9


def test_many_heads_are_near_their_bound() -> None:
    """The search is cut off; what it has by then is within 2% of a bound that nothing is below."""
    for heads, size in ((32, 8), (40, 4), (64, 16)):
        weights = RANDOM.uniform(1, 3, heads).tolist()
        found = map_layer(weights, CopyLimits(size), nodes=500)
        assert sum(weights) / size <= found.bound * (1 + 1e-9) <= found.slowest * (1 + 1e-9) <= found.bound * 1.02


def test_groups_get_the_ranks_that_make_the_slowest_fastest() -> None:
    assert divide_ranks([10, 1, 1], 6) == [4, 1, 1]
    assert divide_ranks([3, 3, 2], 4) in ([2, 1, 1], [1, 2, 1])
    grouping = group_heads([12, 3, 3, 2], 2, 5)
    assert grouping.slowest == grouping.bound == 4.0
    assert sorted(map(sorted, grouping.members)) in ([[0], [1, 2, 3]], [[0, 1, 2], [3]], [[0], [1, 2, 3]])
    assert sum(grouping.ranks) == 5


def test_bounds_by_counting() -> None:
    assert lower_bound([5, 1, 1], 2, 2) == 5
    # Of three equal heads on two ranks one has two.
    assert lower_bound([4, 4, 4], 2, 2) == 8
    assert lower_bound([2, 2, 2, 2, 2], 2, 2) == 6


def test_exchanges_do_not_make_it_slower() -> None:
    for _ in range(50):
        weights = budgets(12)
        sizes = [1, 2, 3]
        start = RANDOM.integers(0, 3, 12).tolist()
        start[:3] = [0, 1, 2]

        def slowest(chosen: list[int], weights: list[float] = weights, sizes: list[int] = sizes) -> float:
            return max(sum(w for w, c in zip(weights, chosen, strict=True) if c == g) / sizes[g] for g in range(3))

        after = exchanged(weights, start, sizes)
        assert slowest(after) <= slowest(start)
        assert set(after) == {0, 1, 2}
