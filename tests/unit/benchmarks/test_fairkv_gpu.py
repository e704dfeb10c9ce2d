"""benchmarks/fairkv_gpu.py on the CPU: every virtual rank's work, its check and its report."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.unit.benchmarks.running import fork_benchmark, refusal

fork = partial(fork_benchmark, "fairkv_gpu.py")


def test_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "fairkv.json"
    methods = ["uniform", "contiguous", "dp2", "split3"]
    done = fork("--device", "cpu", "--tp", "2,4", "--kept", "9,33", "--methods", ",".join(methods), "--json", path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert len(report["rows"]) == 16 and set(report["summary"]) == {"attention", "whole"}
    for row in report["rows"]:
        assert np.shape(row["rank_seconds"]) == (3, row["ranks"]) and len(row["busy_rates"]) == row["ranks"]
        assert all(a < b for a, b in zip(row["seconds"], row["whole_seconds"], strict=True))
        assert 0 < max(row["busy_rates"]) <= 1 and sum(row["rank_tokens"]) == 2 * 6 * row["kept"] * 8
        assert row["method"] == "uniform" or row["max_output_difference"] < 1e-5
        # A step is as slow as its slowest rank in every layer.
        assert all(max(ranks) <= whole for ranks, whole in zip(row["rank_seconds"], row["seconds"], strict=True))
    for part in report["summary"].values():
        assert {degree: list(cells) for degree, cells in part.items()} == {"2": ["9", "33"], "4": ["9", "33"]}
        assert set(part["4"]["33"]["speedup"]) == {"dp2", "split3"}


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--device", "cpu", "--tp", "16"], "--tp 16: allowed: up to --kv-heads 8"),
        (["--device", "cpu", "--kept", "0"], "--kept 0"),
        (["--device", "cpu", "--methods", "dp5"], "--methods dp5"),
    ],
)
def test_what_is_refused_at_once(argv: list[str], named: str) -> None:
    assert named in refusal("fairkv_gpu.py", argv)
