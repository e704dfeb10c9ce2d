"""benchmarks/fairkv.py: who attends to what, and a tiny real run."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.heads.division import HEAD_METHODS, make_division, skewed_budgets
from benchmarks.harness.statistics import paired_ratio
from tests.unit.benchmarks.running import fork_benchmark, refusal

fork = partial(fork_benchmark, "fairkv.py")
SHAPE = {
    "batch": 6,
    "kept": 37,
    "layers": 2,
    "kv-heads": 6,
    "group": 2,
    "head-dim": 16,
    "hidden": 48,
    "intermediate": 48,
    "wide-hidden": 48,
    "wide-intermediate": 64,
    "wide-group": 2,
    "regime-batches": "1,3",
    "regime-kept": "20,60",
    "regime-seconds": 0.1,
}
TINY = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))] + ["--dtype", "fp32"]
TRIED = ("uniform", "contiguous", "nodp", "dp1", "dp3", "split1", "split4")


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 3), (3, 6), (4, 12)])
def test_every_token_is_attended_to_once(ranks: int, batch: int) -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    budgets = skewed_budgets(3, 7, int(rng.integers(20, 90)), 0.8, int(rng.integers(1000)))
    assert len({sum(row) for row in budgets}) == 1 and min(map(min, budgets)) >= 1
    for name in HEAD_METHODS[: 3 if ranks == 1 else None]:
        division = make_division(name, budgets, ranks=ranks, batch=batch)
        for layer, row in enumerate(division.budgets):
            pieces = [piece for rank in division.pieces[layer] for piece in rank]
            for sequence in range(batch):
                for head, budget in enumerate(row):
                    own = sorted((p.start, p.stop) for p in pieces if (p.sequence, p.head) == (sequence, head))
                    assert own[0][0] == 0 and own[-1][1] == budget and all(a < b for a, b in own)
                    assert all(left[1] == right[0] for left, right in zip(own, own[1:], strict=False))
                    assert (len(own) > 1) == (head in division.divided(layer))
        assert name.startswith("split") or not any(map(division.divided, range(3)))
        assert division.slowest >= sum(map(sum, division.loads())) / ranks
        if name not in ("uniform", "contiguous"):
            contiguous = make_division("contiguous", budgets, ranks=ranks, batch=batch)
            assert division.slowest <= contiguous.slowest


def test_the_default_budgets_are_as_skewed_as_log_normal_ones_are_on_average() -> None:
    many = skewed_budgets(2000, 8, 1024, 0.8, 1)
    for ranks in (2, 4, 8):
        own, mean = (
            make_division("contiguous", budgets, ranks=ranks, batch=1).facts()["utilisation"]
            for budgets in (skewed_budgets(8, 8, 2048, 0.8, 222), many)
        )
        assert own == pytest.approx(mean, abs=0.01)


@pytest.mark.drawn("benchmarks")
def test_tiny_run_of_all_parts(tmp_path: Path) -> None:
    path = tmp_path / "fairkv.json"
    done = fork("--ranks", "2", "--repeats", "3", "--methods", ",".join(TRIED), "--profile-seconds", "1",
               "--json", path, *TINY)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert report["benchmark"] == "fairkv"
    for part in ("attention", "engine"):
        summary = report["summary"][part]
        rows = {row["method"]: row for row in report["rows"] if row["part"] == part}
        assert tuple(rows) == TRIED
        for name, row in rows.items():
            assert (row["ranks"], row["batch"], row["kept"], len(row["seconds"])) == (2, 6, 37, 3)
            assert np.shape(row["busy"]) == (2, 3) and all(0 < value < 1 for rank in row["busy"] for value in rank)
            assert summary["busy"][name] == pytest.approx(np.median(row["busy"], axis=1).mean())
            assert sum(row["rank_tokens"]) == 2 * 6 * 37 * 6
            assert row["predicted_s"] > 0
            # Whoever divides the heads, the result is the same.
            difference = row.get("max_output_difference", row.get("max_logit_difference"))
            assert difference is None if name == "uniform" else difference < 1e-5
            if name not in ("uniform", "contiguous"):
                expected = paired_ratio(rows["contiguous"]["seconds"], row["seconds"]).value
                assert summary["speedup"][name]["value"] == pytest.approx(expected)
                predicted = rows["contiguous"]["slowest_tokens"] / row["slowest_tokens"]
                assert summary["predicted"][name] == pytest.approx(predicted)
        assert path.with_suffix(f".{part}.png").read_bytes().startswith(b"\x89PNG")
    assert "Attention of a step on 2 ranks, 6 x 37 kept tokens" in done.stdout and "A decode step on" in done.stdout
    check_regimes(report)
    assert path.with_suffix(".regimes.png").read_bytes().startswith(b"\x89PNG")


def check_regimes(report: dict[str, Any]) -> None:
    """Gains are those of the rows, and the chosen mapping is never predicted to be slower than contiguous heads."""
    rows = [row for row in report["rows"] if row["part"] == "regimes"]
    names = [f"{batch} x {kept}" for batch in (1, 3) for kept in (20, 60)]
    summary, errors = report["summary"], []
    assert list(summary["measured_gain"]) == list(summary["predicted_gain"]) == names
    for name in names:
        own = {row["method"]: row for row in rows if f"{row['batch']} x {row['kept']}" == name}
        assert list(own) == ["contiguous", "nodp", "split1", "time"] and own["split1"]["copies"] > 0
        base = own.pop("contiguous")
        assert own["time"]["left_alone"] == (name in summary["left_alone"])
        for method, row in own.items():
            predicted = base["predicted_s"] / row["predicted_s"]
            measured = paired_ratio(base["seconds"], row["seconds"]).value
            assert summary["predicted_gain"][name][method] == pytest.approx(predicted)
            assert summary["measured_gain"][name][method]["value"] == pytest.approx(measured)
            errors.append(abs(measured / predicted - 1))
        # Parts of shared heads are whole tokens here, of which there are few.
        assert summary["predicted_gain"][name]["time"] >= max(1, *summary["predicted_gain"][name].values()) - 1e-3
    assert summary["prediction_median_error"] == pytest.approx(np.median(errors))
    assert summary["prediction_largest_error"] == pytest.approx(max(errors))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--ranks", "2", "--methods", "contiguous,dp9"], "--methods contiguous,dp9"),
        (["--ranks", "2", "--parts", "attention,all"], "--parts attention,all"),
        (["--ranks", "2", "--regime-kept", "1M"], "--regime-batches up to 16 with --regime-kept up to 1048576"),
        (["--ranks", "2", "--hidden", "100"], "--hidden 100: allowed: multiples of --kv-heads x --group = 128"),
        (
            ["--ranks", "2", "--wide-hidden", "48"],
            "--wide-hidden 48: allowed: multiples of --kv-heads x --wide-group = 32",
        ),
        (["--ranks", "3"], "--kv-heads 8: allowed: multiples of --ranks 3"),
        (["--ranks", "16"], "--ranks 16: allowed: up to --kv-heads 8"),
        (["--ranks", "2", "--sigma", "0"], "--sigma 0"),
        (["--ranks", "2", "--profile-seconds", "0"], "--profile-seconds 0: regimes are predicted gains"),
        (["--ranks", "2", "--kept", "-1"], "--kept -1"),
        (["--ranks", "2", "--kept", "1000000"], "--kept 1000000, --layers 8 and --hidden 512 needs"),
        (["--ranks", "2", "--hidden", "65536"], "--kept 16384, --layers 8 and --hidden 65536 needs"),
    ],
)
def test_impossible_arguments_are_refused_at_once(argv: list[str], named: str) -> None:
    assert named in refusal("fairkv.py", argv)
