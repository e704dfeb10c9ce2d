"""Operations that reach a GPU, counted on a device without one: no more than plain transformers gives it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler, which makes CUDA devices known")
def test_operations_of_a_prompt_and_of_a_step(tmp_path: Path) -> None:
    out = tmp_path / "counts.json"
    command = [sys.executable, str(ROOT / "scripts" / "cuda_counts.py"), "--batches", "1,3", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    document = json.loads(out.read_text())
    summary, rows = document["summary"], document["rows"]
    assert len(rows) == 12
    for kind, most in (("per_layer", 1.0), ("operations", 1.01)):
        over = summary[f"{kind}_over_transformers"]
        assert len(over) == 8
        for name, ratio in over.items():
            assert ratio <= (1.15 if name.startswith("prefill") else most), (kind, name, ratio)
    for row in rows:
        # One for the tokens that rank 0 reads, where transformers asks whether all rows have stopped.
        assert row["waits"] <= (2 if row["stage"] == "decode" else 9), row
        # Where rows lie: a run of nine words of each sequence, and two numbers.
        assert row["bytes_up_per_layer"] <= (row["batch"] * 88 + 8) * (row["stage"] == "decode"), row
        assert row["per_layer"] > 20
