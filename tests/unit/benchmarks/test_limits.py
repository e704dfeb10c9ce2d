"""benchmarks/limits.py: a tiny real run of each part, and what is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.benchmarks.running import fork_benchmark, refusal

fork = partial(fork_benchmark, "limits.py", env={"CUDA_VISIBLE_DEVICES": ""})
WORDS = {
    "host": ["--kv-heads", "1,4", "--head-dim", "20"],
    "ring": ["--contexts", "300,1K", "--ranks", "2,3", "--head-dim", "32"],
}


def works(part: str, dtype: str) -> list[float]:
    """What each case computes, or reads, by hand."""
    size = 4 if dtype == "fp32" else 2
    if part == "host":
        widths = [2 * heads * 20 * size for heads in (1, 4)]
        return [10**6 // width * width for width in widths]
    return [sum(4 * 16 * 32 * (at + 1) for at in range(tokens)) / ranks for tokens in (300, 1024) for ranks in (2, 3)]


@pytest.mark.drawn("benchmarks")
@pytest.mark.parametrize("part", WORDS)
def test_tiny_run(part: str, tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    small = ["--threads", "1", "--repeats", "2", "--matrix", "64", "--megabytes", "1", "--dtypes", "fp32,bf16"]
    environ = {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    asked = ["--parts", part, *small, *WORDS[part], "--json", path, "--wandb", "the-project"]
    done = fork(*asked, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(path.read_text())
    rows, summary = report["rows"], report["summary"]
    for dtype in ("fp32", "bf16"):
        own = [row for row in rows if row["dtype"] == dtype]
        assert [row["work"]["seconds"] for row in own] == works(part, dtype)
        for row in own:
            rate = row["work"]["seconds"] / row["work"]["limit_seconds"]
            pairs = zip(row["seconds"], row["limit_seconds"], strict=True)
            shares = [rate * limit / seconds for seconds, limit in pairs]
            assert len(shares) == 2 and min(shares) <= row["share"]["value"] <= max(shares)
            assert summary[f"{part}_share"][f"{dtype}, {row['case']}"] == row["share"]
        assert summary[f"lowest_{part}_share"][dtype] == min(row["share"]["value"] for row in own)
    [directory] = tmp_path.glob("wandb/offline-run-*")
    assert f"W&B run: {directory}, upload it: wandb sync {directory}" in done.stdout
    [log] = directory.glob("run-*.wandb")
    assert all(
        name in log.read_bytes() for name in (b"the-project", f"summary/lowest_{part}_share".encode(), b'"host":')
    )
    [table] = directory.glob("files/media/table/rows_*.json")
    data = json.loads(table.read_text())
    assert {"case", "g_per_s", "seconds/p50", "seconds/p99"} < set(data["columns"]) and len(data["data"]) == len(rows)


def test_a_run_without_a_gpu_measures_nothing() -> None:
    done = fork("--device", "cuda")
    assert done.returncode == 2 and "this machine has no CUDA GPU" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "nothing"], "--parts nothing: allowed: each of attention, products, rates, host, ring once"),
        (["--contexts", "0"], "--contexts 0: allowed: whole numbers from 1 on"),
        (["--kv-heads", "5"], "--kv-heads 5 is no divisor of 32 query heads"),
        (["--contexts", "16", "--ranks", "16"], "--contexts 16 has fewer tokens than 2 x --ranks 16"),
        (["--dtypes", "int8"], "--dtypes int8: allowed: each of fp32, bf16, fp16 once"),
        (["--wandb", "a:b"], "--wandb a:b: allowed: 1 to 128 characters"),
        (["--megabytes", "0"], "--megabytes 0: allowed: above 0"),
    ],
)
def test_impossible_arguments(arguments: list[str], message: str) -> None:
    assert message in refusal("limits.py", arguments)
