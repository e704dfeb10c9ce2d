"""benchmarks/fairkv_latency.py on the CPU: the paper's lines through measured times."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fairkv_latency import fit_line, fit_lines
from tests.unit.benchmarks.running import fork_benchmark, refusal


@pytest.mark.drawn("benchmarks")
def test_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    shape = ["--kv-heads", "4", "--group", "2", "--head-dim", "16", "--dtype", "fp32"]
    done = fork_benchmark(
        "fairkv_latency.py", "--batches", "1,3,6", "--kept", "16,40", "--repeats", "3", *shape, "--json", path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    grid, summary = report["rows"], report["summary"]
    assert [(row["batch"], row["kept"]) for row in grid] == [(b, c) for b in (1, 3, 6) for c in (16, 40)]
    assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in grid)
    for kept, line in summary["over_batch"].items():
        own = [row for row in grid if row["kept"] == int(kept)]
        assert line == fit_line([row["batch"] for row in own], [sorted(row["seconds"])[1] for row in own])
    assert list(summary["over_batch"]) == ["16", "40"] and list(summary["over_budget"]) == ["1", "3", "6"]
    tokens = [row["batch"] * row["kept"] for row in grid]
    assert summary["over_tokens"] == fit_line(tokens, [sorted(row["seconds"])[1] for row in grid])
    assert "L = alpha B + beta" in done.stdout and "L = gamma C + delta" in done.stdout


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--batches", "4"], "--batches 4: allowed: two or more"),
        (["--kept", "0,5"], "--kept 0,5: allowed: whole numbers from 1 on"),
    ],
)
def test_what_is_refused_at_once(argv: list[str], named: str) -> None:
    assert named in refusal("fairkv_latency.py", argv)


def test_lines_are_recovered() -> None:
    slope, intercept = np.random.uniform(1e-6, 1e-4), np.random.uniform(1e-5, 1e-3)
    xs = np.random.uniform(1, 500, 20)
    line = fit_line(xs.tolist(), (slope * xs + intercept).tolist())
    assert (line["slope"], line["intercept"]) == pytest.approx((slope, intercept))
    assert line["r_squared"] == pytest.approx(1)
    assert fit_line([1, 2], [3, 3])["r_squared"] == 1
    assert fit_line([0, 1, 2], [0, 1, 0])["r_squared"] == pytest.approx(0)


def test_latency_in_batch_and_budget() -> None:
    """Section 3.2: L = alpha B + beta at every budget, L = gamma C + delta at every batch."""
    per_token, start = 2e-8, 3e-5
    batches, budgets = (1, 8, 32), (128, 512, 1024)
    rows = [{"batch": b, "kept": c, "seconds": [per_token * b * c + start]} for b in batches for c in budgets]
    for budget, line in fit_lines(rows, "kept", "batch").items():
        assert (line["slope"], line["intercept"]) == pytest.approx((per_token * int(budget), start))
    for batch, line in fit_lines(rows, "batch", "kept").items():
        assert (line["slope"], line["intercept"]) == pytest.approx((per_token * int(batch), start))
    assert list(fit_lines(rows, "kept", "batch")) == ["128", "512", "1024"]
