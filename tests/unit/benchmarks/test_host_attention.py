"""benchmarks/host_attention.py: a tiny real run, and what is refused."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.unit.benchmarks.running import refusal, run_benchmark

run = partial(run_benchmark, "host_attention.py")


@pytest.mark.drawn("benchmarks")
def test_tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "host.json"
    done = run(
        "--threads", "1,2", "--heads", "6", "--kv-heads", "1,3", "--head-dim", "20", "--megabytes", "1",
        "--repeats", "3", "--json", path, "--wandb", "the-project",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    rows = report["rows"]
    assert [(row["dtype"], row["kv_heads"], row["threads"]) for row in rows] == [
        (dtype, kv_heads, threads) for dtype in ("fp32", "bf16") for kv_heads in (1, 3) for threads in (1, 2)
    ]
    for row in rows:
        assert row["bytes"] == row["tokens"] * 2 * row["kv_heads"] * 20 * (4 if row["dtype"] == "fp32" else 2) <= 1e6
        assert len(row["seconds"]) == len(row["read_seconds"]) == 3
        assert row["gb_s"] > 0 and row["read_gb_s"] > 0
    assert report["summary"]["lowest_share"] == min(row["share"] for row in rows)
    [directory] = tmp_path.glob("wandb/offline-run-*")
    assert f"W&B run: {directory}, upload it: wandb sync {directory}" in done.stdout
    [log] = directory.glob("run-*.wandb")
    content = log.read_bytes()
    assert all(name in content for name in (b"the-project", b"summary/lowest_share", b'"host":', b"megabytes"))
    [table] = directory.glob("files/media/table/rows_*.json")
    data = json.loads(table.read_text())
    assert {"threads", "gb_s", "seconds/p50", "seconds/p99"} < set(data["columns"]) and len(data["data"]) == len(rows)
    assert "bf16, 3 KV heads, 2 threads" in done.stdout and "lowest_share" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-heads", "5"], "--heads 32 is no multiple of --kv-heads 5"),
        (["--threads", "0"], "--threads 0: allowed: whole numbers from 1 on"),
        (["--dtypes", "int8"], "--dtypes int8: allowed: each of fp32, bf16, fp16 once"),
        (["--wandb", "a:b"], "--wandb a:b: allowed: 1 to 128 characters"),
        (["--megabytes", "0"], "--megabytes 0: allowed: above 0"),
    ],
)
def test_impossible_arguments(arguments: list[str], message: str) -> None:
    assert message in refusal("host_attention.py", arguments)
