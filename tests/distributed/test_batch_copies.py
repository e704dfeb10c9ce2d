"""Copies of KV heads that divide the batch: the plain model's tokens, each sequence on one rank, and no merge."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "batch_copies.py"


@pytest.mark.parametrize(
    ("ranks", "batches", "engines"),
    [(2, "1,2,5", 3), (3, "3", 1), pytest.param(4, "1,2,3,5", 3, marks=pytest.mark.full)],
)
def test_copies_that_divide_the_batch(tmp_path: Path, ranks: int, batches: str, engines: int) -> None:
    out = tmp_path / "out.json"
    done = run_ranks(SCRIPT, out, tmp_path, batches, str(engines), ranks=ranks, timeout=300).check()
    results: dict[str, Any] = json.loads(out.read_text())
    mapping = results.pop("mapping")
    assert len(results) == engines
    assert done.stderr.count("nothing is gained with one sequence") == len(results.keys() - {"tokens"})
    for batch in batches.split(","):
        found = results["batch"][batch]
        assert found["greedy"] and found["beams"], (batch, mapping)
        assert "lse" not in found["greedy sent"] + found["beams sent"]
    for name, result in results.items():
        assert result["turns"] and result["fork"] and not result.get("misplaced"), (name, result, mapping)
        assert all(value for key, value in result.items() if key.startswith("from ")), (name, result, mapping)
