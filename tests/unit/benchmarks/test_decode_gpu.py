"""benchmarks/decode_gpu.py on the CPU: rounds, ratios and errors."""

import json
from functools import partial
from pathlib import Path

from tests.unit.benchmarks.running import fork_benchmark, refusal

fork = partial(fork_benchmark, "decode_gpu.py")


def test_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    sizes = ["--contexts", "9,20", "--most-tokens", "20", "--layers", "1", "--new", "7"]
    done = fork("--device", "cpu", *sizes, "--json", path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert [(row["batch"], row["context"]) for row in report["rows"][::3]] == [(1, 9), (1, 20), (2, 9)]
    assert report["summary"]["skipped"] == [{"model": "smollm2", "batch": 2, "context": 20}]
    for row in report["rows"]:
        assert len(row["seconds"]) == len(row["ttft_s"]) == 2 and min(row["seconds"] + row["ttft_s"]) > 0
        assert row["token_agreement"] == 1
    for case in report["summary"]["cases"]:
        assert case["megakv_graphs_over_transformers"] > 0 and case["graphs_ms"] > 0


def test_impossible_settings_are_named() -> None:
    for argv, named in (
        (["--device", "cpu", "--new", "5"], "--new 5: allowed: more than 5"),
        (["--device", "cpu", "--models", "gpt5"], "--models gpt5"),
    ):
        assert named in refusal("decode_gpu.py", argv)
