"""Fair-copying against the optimum, the paper's own algorithms, and in few steps."""

import statistics
from functools import partial

import numpy as np
import pytest

from megakv.base.loads import barrier_utilisation
from megakv.cache.layer import LayerMapping, contiguous_layer
from megakv.fairkv.copy_limits import CopyLimits
from megakv.fairkv.fair_copying import copy_schemes, map_layer, wrap_around
from tests.measuring import count_calls
from tests.unit.fairkv.instances import RANDOM, budgets, skewed
from tests.unit.fairkv.oracles import best_layer, printed_selection


def check(mapping: LayerMapping, weights: list[float], limits: CopyLimits) -> None:
    """Every head is whole, every rank has one, and the limits hold."""
    assert all(len(set(held)) == len(held) and list(held) == sorted(held) for held in mapping.ranks)
    assert {rank for held in mapping.ranks for rank in held} == set(range(limits.tp_size))
    assert limits.allow([len(held) for held in mapping.ranks])
    for shares in mapping.shares:
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0
    assert sum(mapping.loads(weights, limits.tp_size)) == pytest.approx(sum(weights))


@pytest.mark.parametrize("split", ["free", "even"])
@pytest.mark.parametrize("count", [12, pytest.param(250, marks=pytest.mark.full)])
def test_with_copies_within_a_hundredth_of_the_optimum(split: str, count: int) -> None:
    """Of scipy's MILP, with the same split: 500 instances of both."""
    for _ in range(count):
        size = int(RANDOM.integers(2, 5))
        heads, copies = int(RANDOM.integers(2, 7)), int(RANDOM.integers(0, 4))
        copies = max(min(copies, heads * (size - 1)), size - heads)
        weights, limits = budgets(heads), CopyLimits(size, copies)
        limits.check(heads)
        found = map_layer(weights, limits, split)
        best, bound = best_layer(weights, limits, split, reached=found.slowest)
        check(found.mapping, weights, limits)
        assert bound * (1 - 1e-6) <= found.slowest <= best * 1.01, (weights, limits)
        assert found.bound <= min(found.slowest, best * (1 + 1e-6))


@pytest.mark.full
@pytest.mark.parametrize("split", ["free", "even"])
def test_eight_heads_on_eight_ranks_within_two_percent(split: str) -> None:
    for weights in skewed(6, 8):
        limits = CopyLimits(8, 4)
        found = map_layer(weights, limits, split)
        assert found.slowest <= best_layer(weights, limits, split, reached=found.slowest)[0] * 1.02


def test_the_printed_algorithms() -> None:
    """All schemes of Algorithm 1, all placings of Algorithm 2: ours is the fastest within 1%, its max - min rule is no
    better; where that is asked for, its difference is found within 1% of a rank's mean.
    """
    for _ in range(6):
        weights, limits = budgets(4), CopyLimits(3, 2)
        chosen, fastest, spread = printed_selection(weights, 2, 3)
        found = map_layer(weights, limits, "even")
        assert fastest * (1 - 1e-6) <= found.slowest <= fastest * 1.01 and fastest <= chosen
        level = map_layer(weights, limits, "even", criterion="difference")
        check(level.mapping, weights, limits)
        loads = level.mapping.loads(weights, 3)
        assert spread - 1e-5 <= max(loads) - min(loads) <= spread + 0.01 * sum(weights) / 3
        assert level.bound <= spread + 1e-4


@pytest.mark.parametrize(
    ("heads", "size", "copies"), [(8, 4, 0), (8, 8, 4), (8, 4, 3), (3, 5, 4), (1, 2, 1), (5, 1, 0)]
)
def test_by_differences_ranks_are_no_faster_and_no_further_apart(heads: int, size: int, copies: int) -> None:
    for _ in range(4):
        weights, limits = budgets(heads), CopyLimits(size, copies)
        level = map_layer(weights, limits, "even", criterion="difference")
        check(level.mapping, weights, limits)
        apart = np.ptp(level.mapping.loads(weights, size))
        fast = map_layer(weights, limits, "even")
        assert level.bound <= apart <= np.ptp(fast.mapping.loads(weights, size)) + 1e-6 * sum(weights)
        assert level.slowest >= fast.bound * (1 - 1e-6)


def test_schemes_within_the_limits() -> None:
    schemes = list(copy_schemes(3, 2, max_replicas=3, copied_heads=3))
    assert sorted(schemes) == sorted(
        [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 3), (1, 3, 1), (3, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)]
    )
    assert max(map(max, copy_schemes(4, 5, max_replicas=2, copied_heads=4))) == 2
    assert all(sum(n > 1 for n in scheme) <= 1 for scheme in copy_schemes(4, 5, max_replicas=6, copied_heads=1))


@pytest.mark.parametrize(("size", "copies"), [(2, 1), (4, 3), (8, 7), (5, 4), (8, 12), (16, 15)])
def test_one_copy_less_than_ranks_is_perfect(size: int, copies: int) -> None:
    """McNaughton's wrap-around rule: R - 1 cuts make all ranks equal."""
    for heads in (8, 16, 3 if copies >= size - 3 else 16):
        weights = budgets(heads)
        limits = CopyLimits(size, min(copies, heads * (size - 1)))
        found = map_layer(weights, limits)
        check(found.mapping, weights, limits)
        assert found.slowest == pytest.approx(sum(weights) / size, rel=1e-5)


def test_wrapping_around() -> None:
    parts = wrap_around([6, 3, 3], [0, 1, 2], [4, 5, 6])
    assert parts[0] == pytest.approx({4: 4 / 6, 5: 2 / 6})
    assert parts[1] == pytest.approx({5: 2 / 3, 6: 1 / 3})
    assert parts[2] == pytest.approx({6: 1.0})
    # Where a boundary falls between two heads nothing is cut.
    assert wrap_around([2, 2], [0, 1], [0, 1]) == {0: {0: 1.0}, 1: {1: 1.0}}


@pytest.mark.usefixtures("same_budgets")
def test_skewed_profiles() -> None:
    """Log-normal budgets, sigma 0.8: what one copy buys on 4 ranks, and four on 8."""
    layers = skewed(400, 8)
    for size, copies, contiguous, mapped in ((4, 1, 0.63, 0.975), (8, 4, 0.45, 0.96)):
        found = [map_layer(row, CopyLimits(size, copies)).mapping.loads(row, size) for row in layers]
        plain = [contiguous_layer(8, size).loads(row, size) for row in layers]
        assert barrier_utilisation(plain) == pytest.approx(contiguous, abs=0.03)
        assert barrier_utilisation(found) == pytest.approx(mapped, abs=0.015)
        assert all(max(ours) <= max(theirs) * (1 + 1e-9) for ours, theirs in zip(found, plain, strict=True))


@pytest.mark.parametrize("split", ["free", "even"])
def test_few_steps(split: str) -> None:
    """8 KV heads on 8 ranks with 4 copies: some milliseconds a layer, by what is called."""
    calls = []
    for row in skewed(30, 8):
        calls.append(count_calls(partial(map_layer, row, CopyLimits(8, 4), split)))
    assert statistics.median(calls) < 8000


@pytest.mark.parametrize("split", ["free", "even"])
def test_limits_of_replicas_and_of_copied_heads(split: str) -> None:
    for _ in range(20):
        weights = budgets(6)
        limits = CopyLimits(4, 4, max_replicas=int(RANDOM.integers(2, 5)), copied_heads=int(RANDOM.integers(1, 4)))
        found = map_layer(weights, limits, split)
        check(found.mapping, weights, limits)
        free = map_layer(weights, CopyLimits(4, 4), split)
        none = map_layer(weights, CopyLimits(4), split)
        assert free.slowest * (1 - 1e-6) <= found.slowest <= none.slowest * (1 + 1e-6)


@pytest.mark.parametrize("limits", [CopyLimits(4, 3, max_replicas=2), CopyLimits(3, 2, max_replicas=2)])
def test_limited_replicas_against_the_optimum(limits: CopyLimits) -> None:
    for _ in range(3):
        weights = budgets(5)
        slowest = map_layer(weights, limits).slowest
        assert slowest <= best_layer(weights, limits, reached=slowest)[0] * 1.01


def test_nothing_kept_at_all() -> None:
    for split in ("free", "even"):
        for heads, limits in ((8, CopyLimits(4, 2)), (2, CopyLimits(4, 2)), (1, CopyLimits(3, 2))):
            found = map_layer([0.0] * heads, limits, split)
            check(found.mapping, [0.0] * heads, limits)
            assert found.slowest == found.bound == 0


def test_fewer_heads_than_ranks() -> None:
    """Each rank needs a head; a single head goes to all."""
    found = map_layer([100.0], CopyLimits(8, 7))
    assert found.mapping.ranks == (tuple(range(8)),) and found.slowest == pytest.approx(12.5)
    weights = [3.0, 1.0]
    found = map_layer(weights, CopyLimits(4, 2), "even")
    check(found.mapping, weights, CopyLimits(4, 2))
    assert found.slowest == 1.0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (CopyLimits(0), "tp = 0: allowed: 1 or more"),
        (CopyLimits(2, -1), "copies = -1: allowed: 0 or more"),
        (CopyLimits(2, 9), "copies = 9: each of 8 KV heads can be on each of tp = 2 ranks once, which is 8 copies"),
        (CopyLimits(1, 1), "copies = 1: .* 0 copies at most"),
        (CopyLimits(4, 2, max_replicas=5), "max_replicas = 5: .* tp = 4 at most"),
        (CopyLimits(4, 2, max_replicas=0), "max_replicas = 0: allowed: 1 or more"),
        (CopyLimits(4, 2, copied_heads=-1), "copied_heads = -1: allowed: 0 or more"),
        (CopyLimits(9), "tp = 9: 8 KV heads with copies = 0 leave ranks without a head; 1 copies are needed"),
        (
            CopyLimits(12, 4, max_replicas=2, copied_heads=3),
            "copies = 4 and max_replicas = 2 and copied_heads = 3 leave ranks without a head; 4 ",
        ),
    ],
)
def test_impossible_limits(limits: CopyLimits, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        limits.check(8)


def test_contiguous_runs() -> None:
    assert contiguous_layer(8, 4).ranks == ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,))
    assert np.bincount([held[0] for held in contiguous_layer(7, 3).ranks]).tolist() == [2, 2, 3]
    assert contiguous_layer(2, 4).ranks == ((0, 1), (2, 3))
