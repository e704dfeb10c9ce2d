"""The split of a request between replicas: exact on any placement, and fast."""

import statistics
from functools import partial

import numpy as np
import pytest

from megakv.cache.layer import LayerMapping
from megakv.cache.splitting import slowest_loads, split_heads, split_request
from megakv.fairkv.copy_limits import CopyLimits
from megakv.fairkv.fair_copying import map_layer
from megakv.fairkv.requests import imagined_requests, place_for_requests
from tests.measuring import count_calls
from tests.unit.fairkv.instances import RANDOM, budgets
from tests.unit.fairkv.oracles import best_split


def placement(heads: int, size: int) -> list[tuple[int, ...]]:
    """Random ranks of random number for each head."""
    return [
        tuple(sorted(RANDOM.choice(size, RANDOM.integers(1, size + 1), replace=False).tolist())) for _ in range(heads)
    ]


def loads_of(parts: list, ranks: list, size: int) -> list:
    loads = [0] * size
    for part, held in zip(parts, ranks, strict=True):
        for value, rank in zip(part, held, strict=True):
            loads[rank] += value
    return loads


def test_equal_to_the_linear_program() -> None:
    for _ in range(60):
        heads, size = int(RANDOM.integers(1, 10)), int(RANDOM.integers(1, 9))
        weights, ranks = budgets(heads), placement(heads, size)
        slowest, parts = split_heads(weights, ranks, size)
        assert slowest == pytest.approx(best_split(weights, ranks, size), rel=1e-6)
        assert slowest == pytest.approx(slowest_loads(ranks, [weights], size)[0], rel=1e-6)
        assert [sum(part) for part in parts] == pytest.approx(weights, rel=1e-6)
        assert min(min(part) for part in parts) >= 0
        assert max(loads_of(parts, ranks, size)) <= slowest * (1 + 1e-6)


def test_whole_tokens() -> None:
    """Every token goes to one replica, and no rank has more than the best split rounded up."""
    for _ in range(60):
        heads, size = int(RANDOM.integers(1, 10)), int(RANDOM.integers(1, 9))
        ranks = placement(heads, size)
        tokens = RANDOM.integers(0, int(RANDOM.choice([40, 5000, 200_000])), heads).tolist()
        parts = split_request(LayerMapping.even(ranks), tokens, size)
        assert all(isinstance(part, int) and part >= 0 for row in parts for part in row)
        assert [sum(row) for row in parts] == tokens
        best = np.ceil(best_split(tokens, ranks, size) - 1e-6)
        assert max(loads_of(parts, ranks, size)) <= best


def test_many_ranks_without_the_table_of_sets() -> None:
    ranks = placement(20, 16)
    weights = budgets(20)
    assert slowest_loads(ranks, [weights], 16)[0] == pytest.approx(best_split(weights, ranks, 16), rel=1e-6)


def test_extremes() -> None:
    assert split_heads([0, 0], [(0,), (0, 1)], 2) == (0, [[0], [0, 0]])
    assert split_request(LayerMapping.even([(0, 1, 2)]), [2], 3) in ([[1, 1, 0]], [[1, 0, 1]], [[0, 1, 1]])
    # All of one rank's heads give way, one after the other.
    slowest, parts = split_heads([4, 4, 4], [(0,), (0, 1), (1, 2)], 3)
    assert slowest == 4 and parts == [[4], [0, 4], [0, 4]]


def test_few_steps() -> None:
    """It runs per request and layer: microseconds, by what is called."""
    calls = []
    mapping = LayerMapping.even([(k % 4, (k + 1 + k // 4) % 4) for k in range(8)])
    for _ in range(100):
        tokens = np.round(np.array(budgets(8))).astype(int).tolist()
        calls.append(count_calls(partial(split_request, mapping, tokens, 4)))
    assert statistics.median(calls) < 1000


def unlike(weights: list[float], count: int) -> np.ndarray:
    return np.array(weights) * np.exp(0.5 * RANDOM.standard_normal((count, len(weights))))


@pytest.mark.usefixtures("same_budgets")
def test_copies_go_where_requests_need_them() -> None:
    """8 copies on 4 ranks: requests unlike the profile are balanced, and the profile itself perfectly."""
    reached, before = [], []
    for _ in range(6):
        weights = np.exp(0.8 * RANDOM.standard_normal(8)) * 100
        limits = CopyLimits(4, 8)
        first = map_layer(weights.tolist(), limits).mapping
        placed = place_for_requests(first, weights.tolist(), imagined_requests(weights.tolist()), limits)
        assert placed.copies == 8
        assert max(placed.loads(weights.tolist(), 4)) == pytest.approx(weights.sum() / 4, rel=1e-6)
        requests = unlike(weights.tolist(), 100)
        for mapping, values in ((first, before), (placed, reached)):
            values.append((requests.sum(axis=1) / 4 / slowest_loads(mapping.ranks, requests, 4)).mean())
    assert np.mean(reached) >= 0.97
    assert np.mean(reached) > np.mean(before)


def test_placement_for_requests_within_the_limits() -> None:
    for _ in range(5):
        weights = budgets(6)
        limits = CopyLimits(4, 6, max_replicas=2, copied_heads=5)
        first = map_layer(weights, limits).mapping
        placed = place_for_requests(first, weights, unlike(weights, 5), limits)
        assert limits.allow([len(held) for held in placed.ranks])
        assert {rank for held in placed.ranks for rank in held} == set(range(4))
        assert max(placed.loads(weights, 4)) <= max(first.loads(weights, 4)) * (1 + 1e-6)
    nothing = map_layer([0.0] * 6, limits).mapping
    assert place_for_requests(nothing, [0.0] * 6, np.zeros((2, 6)), limits) == nothing
