"""Budgets sum to what was asked for and stay within what there is."""

import numpy as np
import pytest

from megakv.fairkv.budgets import divide, equal, pyramid, shared, tokens_per_head, weighted


def test_tokens_per_head() -> None:
    assert tokens_per_head(100, 1000, 32) == 100
    assert tokens_per_head(0.25, 1000, 32) == 250
    assert tokens_per_head(0.01, 1000, 32) == 32
    assert tokens_per_head(100, 50, 32) == 50
    assert tokens_per_head(1, 7, 32) == 7
    assert tokens_per_head(33.0, 100, 32) == 33


def test_equal_and_shared() -> None:
    assert equal(5, 3).total == 15 and equal(5, 3).floors.tolist() == [5, 5, 5]
    budget = shared(100, 8, 0.2, 32)
    assert budget.total == 800 and (budget.floors == 32 + 13).all()
    assert (shared(1032, 8, 0.2, 32).floors == 232).all()
    assert (shared(20, 8, 0.2, 20).floors == 20).all()


@pytest.mark.parametrize("layers", [1, 2, 4, 33])
@pytest.mark.parametrize(("tokens", "length"), [(100, 1000), (600, 1000), (1000, 1000), (32, 1000), (77, 80)])
def test_a_pyramid_keeps_the_mean(layers: int, tokens: int, length: int) -> None:
    found = [pyramid(tokens, layer, layers, length=length, least=32, decay=20) for layer in range(layers)]
    assert sum(found) == tokens * layers
    assert all(first >= second - 1 for first, second in zip(found, found[1:], strict=False))
    assert min(found) >= 32 and max(found) <= length


def test_a_pyramid_by_hand() -> None:
    # Mean 200 beyond the window: the last layer 200 / 20 = 10, the first 2 x 200 - 10 = 390.
    assert [pyramid(232, layer, 3, length=1000, least=32, decay=20) for layer in range(3)] == [422, 232, 42]


def test_weighted_budgets() -> None:
    weights = np.random.rand(4, 8) ** 8
    found = weighted(100, weights, length=300, least=20, spread=1.25)
    assert found.sum() == 3200
    assert found.min() >= 20 and found.max() <= 300
    assert found.flat[weights.argmax()] == found.max()
    assert (weighted(100, weights, length=100, least=20, spread=1.25) == 100).all()
    even = weighted(100, np.ones((2, 2)), length=300, least=20, spread=1.0)
    assert (even == 100).all()


def test_divide_by_hand_and_by_chance() -> None:
    assert divide(10, [1.0, 1.0, 2.0], 100).tolist() == [3, 2, 5]
    assert divide(10, [0.0, 0.0, 1.0], 4).tolist() == [3, 3, 4]
    assert divide(0, [1.0, 2.0], 5).tolist() == [0, 0]
    for _ in range(200):
        count = np.random.randint(1, 20)
        most = np.random.randint(0, 50)
        total = np.random.randint(0, most * count + 1)
        found = divide(total, np.random.rand(count) ** 10, most)
        assert found.sum() == total and found.min() >= 0 and found.max() <= most
