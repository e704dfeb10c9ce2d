"""Layers against each other: memory, the cap, and the paper's Equation 4."""

import numpy as np
import pytest

from megakv.cache.layer import LayerMapping
from megakv.fairkv.capacity import arrange, least_total, level_ranks, map_layers, memory_of
from megakv.fairkv.copy_limits import CopyLimits
from megakv.fairkv.fair_copying import map_layer
from tests.unit.fairkv.instances import RANDOM, budgets, skewed
from tests.unit.fairkv.oracles import best_layers


def time_of(mappings: list[LayerMapping], rows: list[list[float]], size: int) -> float:
    return sum(max(m.loads(row, size)) for m, row in zip(mappings, rows, strict=True))


def check(mappings: list[LayerMapping], limits: CopyLimits) -> None:
    for mapping in mappings:
        assert limits.allow([len(held) for held in mapping.ranks])
        assert {rank for held in mapping.ranks for rank in held} == set(range(limits.tp_size))
        assert all(sum(shares) == pytest.approx(1) for shares in mapping.shares)


def test_ranks_of_real_depth_hold_equally_much() -> None:
    """Within a hundredth of the mean, or of what the rank with one huge head holds at least."""
    for size in (4, 8):
        for _ in range(9):
            rows = skewed(32, 8)
            mappings = [map_layer(row, CopyLimits(size)).mapping for row in rows]
            arranged = arrange(mappings, rows, size)
            totals = memory_of(arranged, rows, size)
            loads = np.array([mapping.loads(row, size) for mapping, row in zip(mappings, rows, strict=True)])
            # Of every other layer that rank has what a rank has least of.
            huge = (loads.max(axis=1) - loads.min(axis=1)).max() + loads.min(axis=1).sum()
            assert max(totals) <= 1.01 * max(np.mean(totals), huge)
            for before, after, row in zip(mappings, arranged, rows, strict=True):
                assert sorted(before.loads(row, size)) == pytest.approx(sorted(after.loads(row, size)))


def test_orders_are_permutations() -> None:
    loads = RANDOM.uniform(0, 1, (5, 6))
    assert (np.sort(level_ranks(loads), axis=1) == np.arange(6)).all()


def test_without_a_cap_every_layer_is_the_best() -> None:
    rows = skewed(6, 5)
    limits = CopyLimits(3, 1)
    mappings, bound = map_layers(rows, limits)
    reached = time_of(mappings, rows, 3)
    assert bound <= reached == pytest.approx(sum(map_layer(row, limits).slowest for row in rows), rel=1e-6)


@pytest.mark.parametrize("count", [15, pytest.param(150, marks=pytest.mark.full)])
def test_memory_cap_against_the_optimum(count: int) -> None:
    """Never above the cap, refused only where the MILP finds nothing, and as fast as its optimum."""
    for _ in range(count):
        layers, heads, size = int(RANDOM.integers(1, 4)), int(RANDOM.integers(3, 6)), int(RANDOM.integers(2, 4))
        rows = [budgets(heads) for _ in range(layers)]
        limits = CopyLimits(size)
        cap = sum(map(sum, rows)) / size * float(RANDOM.uniform(1.0, 1.15))
        best = best_layers(rows, limits, cap=cap)
        try:
            mappings, bound = map_layers(rows, limits, memory_cap=cap)
        except ValueError as error:
            assert best is None, (rows, size, cap)
            assert f"memory_cap = {cap:g} tokens on each of {size} ranks is infeasible" in str(error)
            continue
        assert best is not None
        check(mappings, limits)
        assert max(memory_of(mappings, rows, size)) <= cap * (1 + 1e-6)
        assert bound <= best[0] * (1 + 1e-6)
        assert time_of(mappings, rows, size) == pytest.approx(best[0], rel=1e-6), (rows, size, cap)


@pytest.mark.parametrize("split", ["free", "even"])
def test_memory_cap_with_copies(split: str) -> None:
    rows = skewed(3, 6)
    limits = CopyLimits(4, 2)
    loose, _ = map_layers(rows, limits, split)
    reached = max(memory_of(loose, rows, 4))
    least = least_total(rows, limits, split).largest
    cap = least + (reached - least) / 2
    mappings, _ = map_layers(rows, limits, split, memory_cap=cap)
    check(mappings, limits)
    assert max(memory_of(mappings, rows, 4)) <= cap * (1 + 1e-6)
    assert time_of(mappings, rows, 4) >= time_of(loose, rows, 4) * (1 - 1e-6)
    if split == "even":
        assert all(len(set(np.round(shares, 9))) == 1 for m in mappings for shares in m.shares)


def test_a_cap_below_the_mean_is_refused_with_what_would_do() -> None:
    with pytest.raises(
        ValueError, match=r"memory_cap = 5 tokens on each of 2 ranks is infeasible: .* keep is 6; raise"
    ):
        map_layers([[3, 3], [3, 3]], CopyLimits(2), memory_cap=5)
    mappings, _ = map_layers([[3, 3], [3, 3]], CopyLimits(2), memory_cap=6)
    assert memory_of(mappings, [[3, 3], [3, 3]], 2) == [6, 6]


def test_a_cap_that_costs_time() -> None:
    """The best layers leave 10 and 6; a cap of 9 is met by one head on the other rank."""
    rows = [[5.0, 1.0, 1.0], [5.0, 3.0, 1.0]]
    assert max(memory_of(map_layers(rows, CopyLimits(2))[0], rows, 2)) <= 9
    rows = [[8.0, 1.0, 1.0]]
    with pytest.raises(ValueError, match="infeasible"):
        map_layers(rows, CopyLimits(2), memory_cap=7)
    mappings, _ = map_layers(rows, CopyLimits(2, 1), memory_cap=5)
    assert memory_of(mappings, rows, 2) == pytest.approx([5, 5])


@pytest.mark.parametrize("count", [15, pytest.param(150, marks=pytest.mark.full)])
def test_equation_4_against_the_optimum(count: int) -> None:
    for _ in range(count):
        layers, heads, size = int(RANDOM.integers(1, 4)), int(RANDOM.integers(2, 5)), int(RANDOM.integers(2, 4))
        heads = max(heads, size)
        rows = [budgets(heads) for _ in range(layers)]
        limits = CopyLimits(size)
        found = least_total(rows, limits)
        best = best_layers(rows, limits, totals=True)
        assert best is not None
        check(found.mappings, limits)
        assert best[1] * (1 - 1e-6) <= found.largest <= best[0] * (1 + 1e-6), (rows, size)
        assert found.bound == pytest.approx(found.largest, rel=1e-6)
        assert max(memory_of(found.mappings, rows, size)) == pytest.approx(found.largest, rel=1e-6)


def test_models_of_a_thousand_heads() -> None:
    """Llama 3.1 405B has 126 layers of 8: more than a search one call deep for each can hold."""
    rows = skewed(126, 8)
    mean = sum(map(sum, rows)) / 8
    found = least_total(rows, CopyLimits(8))
    assert found.bound <= found.largest <= mean * 1.001
    mappings, _ = map_layers(rows, CopyLimits(8), memory_cap=found.largest)
    assert max(memory_of(mappings, rows, 8)) <= found.largest * (1 + 1e-6)


@pytest.mark.parametrize("split", ["free", "even"])
def test_equation_4_of_a_real_depth(split: str) -> None:
    rows = skewed(32, 8)
    mean = sum(map(sum, rows)) / 4
    for copies in (0, 2):
        found = least_total(rows, CopyLimits(4, copies), split)
        check(found.mappings, CopyLimits(4, copies))
        assert found.largest <= mean * (1.0001 if split == "even" or not copies else 1 + 1e-6)
    found = least_total([[7.0, 1.0], [1.0, 1.0]], CopyLimits(3, 1), split)
    check(found.mappings, CopyLimits(3, 1))
