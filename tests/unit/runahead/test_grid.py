"""The grid has the partitions that it should, each once, none with an empty part."""

import math
import random

import numpy as np
import pytest

from megakv.runahead.grid import Grid
from tests.unit.runahead.chains import all_partitions


def any_grid() -> Grid:
    size, unit = random.randint(2, 12), random.choice((1, 2, 7, 64))
    return Grid(random.randint(size * unit, 40 * size * unit), size, unit)


def test_the_papers_example() -> None:
    grid = Grid(96, 4, 2)
    assert grid.strides == (8, 4, 2)
    assert len(all_partitions(96, 4, 2)) == 16_215
    coarse = {grid.partition(row) for row in grid.coarse()}
    assert len(coarse) == math.comb(11, 3)
    assert all(sum(part) == 96 and min(part) >= 8 and not any(p % 8 for p in part) for part in coarse)
    # Five values of each bound around a cell's centre.
    assert len(grid.around(grid.bounds((24, 24, 24, 24)), 4)) == 5**3
    assert grid.points_around == 125


@pytest.mark.parametrize("trial", range(40))
def test_partitions_around_another_are_whole_and_their_own(trial: int) -> None:
    grid = any_grid()
    weights = np.random.default_rng(random.getrandbits(32)).random(grid.size) ** 3
    parts = np.floor(weights / weights.sum() * grid.tokens).astype(int)
    parts[0] += grid.tokens - parts.sum()
    center = grid.nearest(parts.tolist())
    assert grid.nearest(center) == center
    for stride in grid.strides:
        rows = [grid.partition(row) for row in grid.around(grid.bounds(center), stride)]
        assert center in rows and len(set(rows)) == len(rows)
        for row in rows:
            assert sum(row) == grid.tokens and min(row[:-1]) >= grid.unit and row[-1] >= 1
            assert not any(bound % grid.unit for bound in grid.bounds(row).tolist())


@pytest.mark.parametrize("trial", range(20))
def test_balances_give_equal_work(trial: int) -> None:
    size = random.randint(2, 16)
    grid = Grid(random.randint(10**6, 10**7), size, 1)
    evenly, *others = grid.balances()
    assert max(evenly) - min(evenly) <= 1
    for share, partition in zip((0.25, 0.5, 0.75), others, strict=True):
        edges = np.concatenate([[0], np.cumsum(partition)]) / grid.tokens
        work = np.diff((1 - share) * edges + share * edges**2)
        np.testing.assert_allclose(work, 1 / size, rtol=1e-3)


def test_strides_halve_down_to_the_unit() -> None:
    for _ in range(50):
        grid = any_grid()
        strides = grid.strides
        assert strides[-1] == grid.unit
        assert all(a == 2 * b for a, b in zip(strides, strides[1:], strict=False))
        assert len(grid.coarse()) <= 462
