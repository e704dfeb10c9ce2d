"""benchmarks/scaling.py: a tiny real run, and the lines that it draws through memory."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.statistics import ratio
from tests.unit.benchmarks.running import fork_benchmark, refusal, tiny

TINY = tiny(heads=4, kv_heads=2)
fork = partial(fork_benchmark, "scaling.py")


@pytest.mark.drawn("benchmarks")
def test_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    quick = ["--quick", "--contexts", "96,640", "--repeats", "2", "--profile-seconds", "0.1"]
    done = fork("--ranks", "2", *quick, "--json", path, *TINY)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert set(report) == {"benchmark", "machine", "versions", "args", "rows", "summary"}
    assert report["benchmark"] == "scaling" and report["args"]["sizes"] == [1, 2]
    names = {1: ["cp", "tp"], 2: ["cp", "tp", "tp_gloo"]}
    assert [(row["ranks"], row["context"], row["method"]) for row in report["rows"]] == [
        (ranks, context, name) for ranks in (1, 2) for context in (96, 640) for name in names[ranks]
    ]
    whole = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) * 4 + (2 * 300 * 64 + 64) * 4
    for row in report["rows"]:
        assert len(row["seconds"]) == len(row["ttit_seconds"]) == 2
        assert all(value > 0 for value in row["seconds"] + row["ttit_seconds"])
        assert row["max_logit_difference"] <= 1e-5 and len(row["weight_bytes"]) == row["ranks"]
        if row["method"] == "cp":
            assert 0 < row["predicted_ttit_s"] < math.inf and 0 < row["predicted_s"] < math.inf
            # Context parallelism keeps all weights on every rank; tensor parallelism cuts most of them.
            assert row["weight_bytes"] == [whole] * row["ranks"]
        elif row["ranks"] == 2:
            assert max(row["weight_bytes"]) < 0.8 * whole

    summary = report["summary"]
    middle = {(row["ranks"], row["context"], row["method"]): np.median(row["seconds"]) for row in report["rows"]}
    for context in (96, 640):
        ratios = summary["scaling_ratio"][str(context)]
        assert set(ratios) == {"cp", "tp", "tp_gloo"}
        assert ratios["cp"]["2"]["value"] == pytest.approx(middle[1, context, "cp"] / middle[2, context, "cp"])
        for name in ("tp", "tp_gloo"):
            assert ratios[name]["2"]["value"] == pytest.approx(middle[1, context, "tp"] / middle[2, context, name])
        assert set(summary["ttft_ttit"][str(context)]) == {"CP1", "TP1", "CP2", "TP2", "TP2 gloo"}
    assert "scaling_ratio  96  cp  2" in done.stdout


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--ranks", "2", "--sizes", "1,4"], "--sizes 1,4"),
        (["--ranks", "4", "--kv-heads", "2", "--heads", "4"], "--kv-heads 2 is no multiple of 4 ranks"),
        (["--ranks", "2", "--contexts", "512,many"], "--contexts 512,many"),
        (["--ranks", "2", "--tokens", "1"], "--tokens 1"),
    ],
)
def test_impossible_arguments_are_refused_at_once(argv: list[str], named: str) -> None:
    assert named in refusal("scaling.py", argv)


def test_ratio_of_independent_samples() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(60):
        found = ratio(2 * rng.normal(1, 0.1, 12), rng.normal(1, 0.1, 9), paired=False)
        assert found.low <= found.value <= found.high
        covered += found.low <= 2 <= found.high
    assert covered >= 52
