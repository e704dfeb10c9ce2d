"""Compressed caches in few bits on real ranks: what is rounded does not depend on the mesh."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "packed_bodies.py"


def launch(folder: Path, meshes: str, ranks: int) -> dict[str, Any]:
    out = folder / f"{ranks}.json"
    run_ranks(SCRIPT, out, folder, meshes, ranks=ranks, timeout=200).check()
    return json.loads(out.read_text())


def test_meshes_round_alike(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Logits as on one rank, but for elements that the last digit of a sum takes to the next level; what a session has
    held comes back bit by bit.
    """
    alone = launch(tmp_path, "1x1:stream", 1)
    rounding = alone.pop("rounding")
    meshes = ["2x1:cpu_rank", "1x2:stream"]
    drawn = meshes if pytestconfig.getoption("--full") else [random.choice(meshes)]
    several = launch(tmp_path, ",".join(drawn), 2)
    assert len(several) == 2 * len(drawn) and rounding > 1e-3
    for name, found in (alone | several).items():
        assert found["restored"] and found["tokens"] > 200, name
        assert found["error"] <= 0.1 * rounding, name
        assert (found["hosted"] > 0) == ("cpu_rank" in name), name
