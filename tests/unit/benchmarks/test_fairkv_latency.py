"""benchmarks/fairkv_latency.py on the CPU: the paper's lines through measured times, and predicted steps."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fairkv_latency import fit_line, fit_lines
from megakv.costmodel.hardware import load_profile
from tests.unit.benchmarks.running import refusal, run_benchmark

run = partial(run_benchmark, "fairkv_latency.py")


@pytest.mark.drawn("benchmarks")
def test_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    shape = ["--kv-heads", "4", "--group", "2", "--head-dim", "16", "--dtype", "fp32", "--layers", "2"]
    done = run(
        "--batches",
        "1,3,6",
        "--kept",
        "16,40",
        "--repeats",
        "3",
        "--tp",
        "2",
        *shape,
        "--profile-seconds",
        "1",
        "--json",
        path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    grid, steps = ([row for row in report["rows"] if row["part"] == part] for part in ("grid", "step"))
    assert [(row["batch"], row["kept"]) for row in grid] == [(b, c) for b in (1, 3, 6) for c in (16, 40)]
    assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in report["rows"])
    summary = report["summary"]
    for kept, line in summary["over_batch"].items():
        own = [row for row in grid if row["kept"] == int(kept)]
        assert line == fit_line([row["batch"] for row in own], [sorted(row["seconds"])[1] for row in own])
    assert list(summary["over_batch"]) == ["16", "40"] and list(summary["over_budget"]) == ["1", "3", "6"]
    assert [row["method"] for row in steps] == ["contiguous", "nodp", "split1"] == list(summary["predicted"])
    for row in steps:
        # Two layers of 4 heads with 40 tokens on average.
        assert (row["batch"], row["kept"]) == (3, 40) and sum(map(sum, row["loads"])) == 2 * 4 * 40
        found = summary["predicted"][row["method"]]
        assert found["predicted_s"] == row["predicted_s"] > 0
        layers = zip(*row["rank_seconds"], strict=True)
        measured = sum(max(sorted(times)[1] for times in zip(*layer, strict=True)) for layer in layers)
        assert found["measured_s"] == pytest.approx(measured)
        assert found["off"] == pytest.approx(found["predicted_s"] / measured - 1)
        # Of three runs the fastest is the lower decile.
        fastest = sum(max(map(min, zip(*layer, strict=True))) for layer in zip(*row["rank_seconds"], strict=True))
        assert found["undisturbed_s"] == pytest.approx(fastest)
        assert found["undisturbed_off"] == pytest.approx(found["predicted_s"] / fastest - 1)
    # The profile that it was predicted from; so many heads keep as many tokens everywhere.
    model_of = {row["method"]: row["predicted_s"] for row in steps}
    call = load_profile(tmp_path / "latency.profiles" / "1.json").ragged[0].call
    slowest = sum(max(layer) for layer in steps[0]["loads"])
    assert model_of["contiguous"] >= 2 * call.call_s + 2 * 6 * call.head_s + 3 * slowest * call.token_s - 1e-12
    assert "L = alpha B + beta" in done.stdout and "L = gamma C + delta" in done.stdout


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--batches", "4"], "--batches 4: allowed: two or more"),
        (["--kept", "0,5"], "--kept 0,5: allowed: whole numbers from 1 on"),
        (["--tp", "9"], "--tp 9: allowed: up to --kv-heads 8"),
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
