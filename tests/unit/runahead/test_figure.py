"""The picture of a search can be drawn for any number of ranks and levels."""

import random
from pathlib import Path

import pytest

from megakv.runahead.figure import draw_searches
from megakv.runahead.grid import Grid
from megakv.runahead.search import PartitionSearch
from tests.unit.runahead.chains import SimulatedChain


@pytest.mark.parametrize("full_grid", [False, True])
def test_pictures_are_drawn(tmp_path: Path, full_grid: bool) -> None:
    results = []
    for tokens, size in ((96, 2), (96, 4)):
        ask = SimulatedChain.any(tokens, random.Random(random.getrandbits(32))).evaluator()
        search = PartitionSearch(Grid(tokens, size, 2), ask, full_grid=full_grid, finalists=2, rounds=2)
        results.append(search.run())
    path = tmp_path / "search.png"
    draw_searches(path, results, title="A search")
    assert path.read_bytes().startswith(b"\x89PNG") and len(path.read_bytes()) > 10_000
