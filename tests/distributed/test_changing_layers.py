"""Ranks meet in a layer however each of them computes it, and read no memory that a layer has left."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

NAMES = ("model", "elsewhere", "short", "sharded", "heard", "unheard", "short, heard", "question")
SCRIPT = Path(__file__).parent / "ranks" / "changing_layers.py"


@pytest.mark.parametrize("mesh", ["2x1", "1x2"])
def test_what_one_rank_changes_keeps_no_other_waiting(mesh: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_ranks(SCRIPT, mesh, out, ranks=2, timeout=180).check()
    assert json.loads(out.read_text()) == [dict.fromkeys(NAMES, False)] * 2
