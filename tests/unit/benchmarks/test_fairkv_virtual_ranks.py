"""benchmarks/fairkv_virtual_ranks.py: every rank's kernels by themselves, steps and gains put together of them."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.unit.benchmarks.running import fork_benchmark, refusal

fork = partial(fork_benchmark, "fairkv_virtual_ranks.py")
SHAPE = "--kv-heads 4 --group 2 --head-dim 16 --hidden 128 --intermediate 64 --layers 2 --dtype fp32".split()


def step(row: dict) -> float:
    ranks, shared = np.array(row["rank_kernel_seconds"]), np.array(row["feed_forward_seconds"])
    slowest = sum(max(np.median(ranks[:, layer, rank]) for rank in range(row["ranks"])) for layer in range(2))
    return float(slowest + sum(np.median(shared[:, layer]) for layer in range(2)) + row["modelled_s"])


def test_tiny_run(tmp_path: Path) -> None:
    path, methods = tmp_path / "virtual.json", ["nodp", "dp1", "split1", "time"]
    words = ["--tp", "2,4", "--batches", "1,4", "--kept", "40", "--repeats", "3", "--profile-seconds", "1"]
    done = fork(*words, *SHAPE, "--methods", ",".join(methods), "--json", path, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    rows, summary = report["rows"], report["summary"]
    assert len(rows) == 2 * 2 * 5 and "timed alone" in summary["how"] and summary["how"] in done.stdout
    for row in rows:
        assert np.shape(row["rank_kernel_seconds"]) == np.shape(row["attention_seconds"]) == (3, 2, row["ranks"])
        assert np.shape(row["feed_forward_seconds"]) == (3, 2)
        # Sums over ranks, at least, are not measured.
        assert 0 < row["modelled_s"] < row["predicted_step_s"]
        assert sum(row["rank_tokens"]) == 2 * 4 * 40 * row["batch"]
    for name, gains in summary["measured_gain"].items():
        tp, batch = (int(word) for word in name.removeprefix("TP ").split(" x ")[0].split(", "))
        own = {row["method"]: row for row in rows if (row["ranks"], row["batch"]) == (tp, batch)}
        assert list(gains) == methods
        for method, gain in gains.items():
            assert gain["value"] == pytest.approx(step(own["contiguous"]) / step(own[method]))
            expected = own["contiguous"]["predicted_step_s"] / own[method]["predicted_step_s"]
            assert summary["predicted_gain"][name][method] == pytest.approx(expected)
        assert summary["predicted_gain"][name]["time"] >= 1 - 1e-9
        (copies, ratio), *_ = summary["batch_over_tokens"][name].items()
        assert copies == "1" and ratio["value"] == pytest.approx(step(own["dp1"]) / step(own["split1"]))


def test_a_run_without_a_profile_is_of_kernels_alone(tmp_path: Path) -> None:
    path, words = tmp_path / "virtual.json", ["--tp", "2", "--batches", "3", "--kept", "20,40", "--repeats", "2"]
    done = fork(*words, *SHAPE, "--methods", "nodp,split1", "--profile-seconds", "0", "--json", path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert "predicted_gain" not in report["summary"] and all("modelled_s" not in row for row in report["rows"])
    for name, found in report["summary"]["attention_gain"].items():
        own = {row["method"]: row for row in report["rows"] if f"3 x {row['kept']}" in name}
        times = {method: np.median(row["attention_seconds"], axis=0) for method, row in own.items()}
        seconds = {method: each.max(axis=-1).sum() for method, each in times.items()}
        for method, gain in found.items():
            assert gain["value"] == pytest.approx(seconds["contiguous"] / seconds[method])


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--tp", "16"], "--tp 16: allowed: up to --kv-heads 8"),
        (["--tp", "3"], "divisors of --intermediate 14336"),
        (["--profile-seconds", "0"], "--profile-seconds 0: the cost model chooses for --methods time"),
        (["--methods", "contiguous"], "--methods contiguous"),
    ],
)
def test_what_is_refused_at_once(argv: list[str], named: str) -> None:
    assert named in refusal("fairkv_virtual_ranks.py", argv)
