"""Best-effort assignment against the optimum."""

import numpy as np
import pytest

from megakv.fairkv.assignment import Schemes, assign, lower_bounds, rebalance
from megakv.fairkv.copy_limits import CopyLimits
from megakv.fairkv.fair_copying import map_layer
from tests.unit.fairkv.instances import RANDOM, budgets
from tests.unit.fairkv.oracles import best_layer


@pytest.mark.parametrize(("count", "most"), [(100, 7), pytest.param(500, 10, marks=pytest.mark.full)])
def test_without_copies_within_a_hundredth_of_the_optimum(count: int, most: int) -> None:
    """FairKV-NoDP on random instances, and what scipy's MILP proves to be the best."""
    for _ in range(count):
        size = int(RANDOM.integers(2, min(most, 8) + 1))
        weights = budgets(int(RANDOM.integers(size, most + 1)))
        limits = CopyLimits(size)
        best, bound = best_layer(weights, limits, reached=map_layer(weights, limits).slowest)
        for split in ("free", "even"):
            found = map_layer(weights, limits, split)
            assert bound * (1 - 1e-6) <= found.slowest <= best * 1.01, (weights, size, split)
            assert found.bound <= min(found.slowest, best * (1 + 1e-6))
            assert found.mapping.copies == 0
            held = {ranks[0] for ranks in found.mapping.ranks}
            assert held == set(range(size)), "a rank without a head"
            assert max(found.mapping.loads(weights, size)) == pytest.approx(found.slowest)


def test_uneven_counts_of_heads() -> None:
    found = map_layer([9, 1, 1, 1, 1, 1, 1, 1], CopyLimits(2))
    assert sorted(np.bincount([ranks[0] for ranks in found.mapping.ranks])) == [1, 7]
    assert found.slowest == 9


def test_many_heads_are_near_their_bound() -> None:
    """Within 1% of a bound that nothing is below."""
    for heads, size in ((32, 8), (40, 4), (64, 16)):
        weights = RANDOM.uniform(1, 3, heads).tolist()
        found = map_layer(weights, CopyLimits(size))
        assert sum(weights) / size <= found.bound * (1 + 1e-9) <= found.slowest * (1 + 1e-9) <= found.bound * 1.01


def places(*speeds: int, heads: int) -> Schemes:
    """One way to place heads: as often as once, on places of so many ranks."""
    return Schemes(np.ones((1, heads), dtype=np.int64), np.array([speeds]))


def test_groups_get_the_ranks_that_make_the_slowest_fastest() -> None:
    found = map_layer([10, 1, 1], CopyLimits(6, 3))
    assert found.mapping.ranks[0] == (0, 1, 2, 3) and found.slowest == pytest.approx(2.5)
    found = map_layer([12, 3, 3, 2], CopyLimits(5, 3))
    assert found.slowest == pytest.approx(found.bound) == pytest.approx(4.0)
    found_places = assign([12, 3, 3, 2], places(3, 2, heads=4))
    assert found_places.value == found_places.bound == 4.0 and found_places.places == [(0,), (1,), (1,), (1,)]


def test_bounds_by_counting() -> None:
    def bound(weights: list[float]) -> float:
        return float(lower_bounds(np.array([weights]), places(1, 1, heads=len(weights)))[0])

    assert bound([5, 1, 1]) == 5
    # Of three equal heads on two ranks one has two.
    assert bound([4, 4, 4]) == 8
    assert bound([2, 2, 2, 2, 2]) == 6


def test_places_that_divide_their_heads_anew_are_no_slower() -> None:
    speeds = np.array([1, 2, 3])
    for _ in range(50):
        sizes = np.array(budgets(12))
        start = np.eye(3, dtype=bool)[[0, 1, 2, *RANDOM.integers(0, 3, 9)]]
        after = rebalance(sizes, speeds, start)
        assert (sizes @ after / speeds).max() <= (sizes @ start / speeds).max()
        apart = rebalance(sizes, speeds, start, criterion="difference")
        assert np.ptp(sizes @ apart / speeds) <= np.ptp(sizes @ start / speeds)
        assert (after.sum(axis=1) == 1).all() and (apart.sum(axis=1) == 1).all()
