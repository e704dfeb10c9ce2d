"""benchmarks/offload.py: a tiny real run, and what its summary is made of."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "offload.py"
TINY = [
    "--layers", "2", "--hidden", "64", "--heads", "4", "--batch", "2", "--prompt", "33", "--chunk", "8",
]  # fmt: skip
METHODS = ["in_memory", "transformers", "stream", "kvpr", "chunked", "cpu_rank", "auto"]


def run(*argv: str | Path, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, argv)], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip


def test_tiny_run_of_all_methods(tmp_path: Path) -> None:
    path = tmp_path / "offload.json"
    done = run("--links", "0.002,0.02", "--repeats", "2", "--new", "7", "--json", path, *TINY)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "The link is emulated" in done.stdout
    report: dict[str, Any] = json.loads(path.read_text())
    cases = [(shape, link) for shape in ("opt", "gqa") for link in (0.002, 0.02)]
    rows = {(row["shape"], row["link_gb_s"], row["method"]): row for row in report["rows"]}
    assert list(rows) == [(*case, method) for case in cases for method in METHODS]
    assert report["summary"]["tokens_equal"] and report["summary"]["link"] == "emulated"
    assert report["summary"]["auto_over_best"] > 0 and report["summary"]["prediction_median_error"] >= 0
    token = {"opt": 2 * 64 * 4, "gqa": 2 * 16 * 4}
    for (shape, _, method), row in rows.items():
        if method == "in_memory":
            assert row["bytes_in"] == 0
            continue
        assert row["bytes_in"] > 0
        if method in ("stream", "cpu_rank") and shape == "gqa":
            # New tokens only: two sequences, two layers.
            assert row["bytes_out"] == pytest.approx(2 * 2 * token[shape], rel=0.6)
        if method == "transformers":
            # Everything comes back in every step, and on average so does a prompt longer by half the new tokens.
            assert row["bytes_out"] == pytest.approx(2 * 2 * token[shape] * 36.5, rel=0.1)
    assert all(split == 0 for row in report["rows"] if row["method"] == "stream" for _, split in row["split_points"])
    recomputed = [split for _, split in rows["opt", 0.002, "chunked"]["split_points"]]
    assert min(recomputed) > 0
    assert path.with_suffix(".png").is_file() and path.with_name("offload_split.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--links", "0"], "--links: allowed: numbers above 0"),
        (["--shapes", "bert"], "--shapes bert: allowed: opt, gqa"),
        (["--new", "3"], "--new 3: allowed: 6 or more"),
        (["--heads", "6"], "--heads 6: allowed: multiples of 4"),
    ],
)
def test_impossible_arguments(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and message in done.stderr
