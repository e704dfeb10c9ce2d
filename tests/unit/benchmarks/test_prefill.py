"""benchmarks/prefill.py as a user starts it: its own ranks, its own clean-up, valid results."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import Patience, alive_after
from tests.unit.benchmarks.running import BENCHMARKS, fork_benchmark, outputs, refusal, run_benchmark, tiny

SCRIPT = BENCHMARKS / "prefill.py"
TINY = tiny()


def start(*argv: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes below the launcher that run the script."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "RANK" in child.environ() and str(SCRIPT) in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


@pytest.mark.drawn(1)
@pytest.mark.parametrize("run", [run_benchmark, fork_benchmark])
def test_tiny_run_of_all_methods(run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "prefill.json"
    methods = ["single", "tp", "tp_gloo", "pass_kv", "pass_q", "all_gather"]
    asked = ["--ranks", "2", "--context", "128", "--repeats", "3", "--methods", ",".join(methods), "--json", path]
    done = run("prefill.py", *asked, *TINY, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert set(report) == {"benchmark", "machine", "versions", "args", "rows", "summary"}
    assert report["benchmark"] == "prefill" and report["args"]["layers"] == 2 and report["args"]["threads"] == 1
    rows = {row["method"]: row for row in report["rows"]}
    assert list(rows) == methods
    for name, row in rows.items():
        assert (row["ranks"], row["context"]) == (2, 128)
        assert len(row["seconds"]) == 3 and all(value > 0 for value in row["seconds"])
        assert row["seconds"] == [max(values) for values in row["rank_seconds"]]
        assert len(row["peak_bytes"]) == len(row["working_bytes"]) == 2
        assert all(0 <= work < peak for work, peak in zip(row["working_bytes"], row["peak_bytes"], strict=True))
        assert row["max_logit_difference"] <= 1e-5
        assert row["shared_memory"] in ([True, False] if name == "tp" else [False])
        # Two layers of 128 tokens, 2 KV heads of 16, keys and values, 4 bytes; halved by every kind of parallelism.
        assert row["kv_bytes"] == [(1 if name == "single" else 0.5) * 2 * 128 * 2 * 16 * 2 * 4] * 2
    assert rows["single"]["bytes_sent"] == [{}, {}]
    # Two sums of 128 x 64 per layer, and one of 300 logits; a ring of two sends each once.
    for name in ("tp", "tp_gloo"):
        assert rows[name]["bytes_sent"] == [{"all_reduce": (2 * 2 * 128 * 64 + 300) * 4}] * 2
    # Each rank sends its own keys and values once, but of the last layer, where the last token's queries go round; that
    # token, whose logits all get, is rank 0's: balanced chunks.
    kv, logits = rows["pass_kv"]["kv_bytes"][0], 300 * 4
    sent = [{name: rank.get(name, 0) for name in ("pass_kv", "logits")} for rank in rows["pass_kv"]["bytes_sent"]]
    assert sent == [{"pass_kv": kv / 2, "logits": logits}, {"pass_kv": kv / 2, "logits": 0}]
    assert kv <= rows["all_gather"]["bytes_sent"][1]["all_gather"] <= 1.05 * kv

    summary = report["summary"]
    assert list(summary["speedup"]) == ["2 ranks, 128 tokens"]
    speedup = summary["speedup"]["2 ranks, 128 tokens"]
    assert set(speedup) == {"pass_kv", "pass_q", "all_gather"}
    for name, peers in speedup.items():
        assert set(peers) == {"single", "tp", "tp_gloo"}
        for peer, found in peers.items():
            ratios = [a / b for a, b in zip(rows[peer]["seconds"], rows[name]["seconds"], strict=True)]
            assert found["value"] == pytest.approx(sorted(ratios)[1])
            assert 0 < found["low"] <= found["value"] <= found["high"] < math.inf
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "speedup  2 ranks, 128 tokens  pass_kv  tp_gloo" in done.stdout
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["prefill.json", "prefill.png"]


@pytest.mark.drawn("benchmarks")
def test_tiny_run_by_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    asked = ["--ranks", "2", "--sizes", "1,2", "--context", "96,640", "--tokens", "5", "--repeats", "2"]
    done = fork_benchmark("prefill.py", *asked, "--profile-seconds", "0.1", "--json", path, *TINY)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    names = {1: ["single", "pass_kv"], 2: ["tp", "tp_gloo", "pass_kv"]}
    assert [(row["ranks"], row["context"], row["method"]) for row in report["rows"]] == [
        (ranks, context, name) for ranks in (1, 2) for context in (96, 640) for name in names[ranks]
    ]
    whole = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) * 4 + (2 * 300 * 64 + 64) * 4
    for row in report["rows"]:
        assert len(row["seconds"]) == len(row["ttit_seconds"]) == 2
        assert all(value > 0 for value in row["seconds"] + row["ttit_seconds"])
        assert row["max_logit_difference"] <= 1e-5 and len(row["weight_bytes"]) == row["ranks"]
        if row["method"] == "pass_kv":
            assert 0 < row["predicted_ttit_s"] < math.inf and 0 < row["predicted_s"] < math.inf
            # Context parallelism keeps all weights on every rank; tensor parallelism cuts most of them.
            assert row["weight_bytes"] == [whole] * row["ranks"]
        else:
            assert row["predicted_s"] is row["predicted_ttit_s"] is None
            assert row["ranks"] == 1 or max(row["weight_bytes"]) < 0.8 * whole
    summary = report["summary"]
    middle = {(row["ranks"], row["context"], row["method"]): sum(row["seconds"]) / 2 for row in report["rows"]}
    for context in (96, 640):
        ratios = summary["scaling_ratio"][str(context)]
        assert set(ratios) == {"pass_kv", "tp", "tp_gloo"}
        for name, found in ratios.items():
            first = middle[1, context, "pass_kv" if name == "pass_kv" else "single"]
            assert found["2"]["value"] == pytest.approx(first / middle[2, context, name])
        said = {f"{name} {ranks}" for ranks, several in names.items() for name in several}
        assert set(summary["ttft_ttit"][str(context)]) == said


def test_end_by_sigterm_leaves_no_rank(tmp_path: Path) -> None:
    process = start("--ranks", "2", "--context", "256", "--repeats", "100000", "--methods", "single", *TINY)
    patience = Patience(60)
    while len(ranks := ranks_of(process)) < 2 and not patience.over:
        time.sleep(0.1)
    assert len(ranks) == 2
    process.send_signal(signal.SIGTERM)
    outputs(process, 20)
    assert process.returncode == 128 + signal.SIGTERM
    assert alive_after(5, ranks) == []


def test_run_beyond_its_time_is_ended() -> None:
    process = start("--ranks", "1", "--timeout", "2", *TINY)
    _, err = outputs(process, 30)
    assert process.returncode == 124 and "--timeout 2 s" in err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--ranks", "2", "--methods", "single,ring"], "--methods single,ring"),
        (["--ranks", "3"], "--kv-heads 2 is no multiple of 3 ranks"),
        (["--ranks", "0"], "--ranks 0"),
        (["--ranks", "2", "--context", "0"], "--context 0"),
        (["--ranks", "2", "--sizes", "1,4"], "--sizes 1,4"),
        (["--ranks", "2", "--context", "512,many"], "--context 512,many"),
        (["--ranks", "2", "--tokens", "1"], "--tokens 1"),
        (["--ranks", "2", "--hosts", "4"], "--hosts 4: allowed: 2 or more, of which --ranks 2 is a multiple"),
    ],
)
def test_impossible_arguments_are_refused_at_once(argv: list[str], named: str) -> None:
    assert named in refusal("prefill.py", [*TINY, *argv])
