"""benchmarks/multiturn.py: a tiny real run, and the verdict on a choice from samples whose truth is known."""

import json
import math
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.statistics import Case, crossover, judge
from tests.unit.benchmarks.running import fork_benchmark, refusal, tiny

TINY = tiny(heads=8, kv_heads=2)
fork = partial(fork_benchmark, "multiturn.py")


@pytest.mark.drawn("benchmarks")
def test_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "multiturn.json"
    done = fork(
        "--ranks", "2", "--context", "300", "--miss-rates", "100,3,40", "--pairs", "3", "--most-pairs", "3",
        "--profile-seconds", "0", "--json", path, *TINY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert set(report) == {"benchmark", "machine", "versions", "args", "rows", "summary"}
    assert report["benchmark"] == "multiturn" and report["args"]["kv_heads"] == 2
    assert [(row["method"], row["new_tokens"], row["cached_tokens"]) for row in report["rows"]] == [
        (name, new, 300 - new) for new in (9, 120, 300) for name in ("pass_kv", "pass_q")
    ]
    for row in report["rows"]:
        assert (row["ranks"], row["context"], row["rate"]) == (2, 300, "free")
        assert len(row["seconds"]) == 3 and all(value > 0 for value in row["seconds"])
        assert row["seconds"] == [max(values) for values in row["rank_seconds"]]
        assert row["max_logit_difference"] <= 1e-5
        # The policy without a profile goes by the bytes: 2 of 8 heads, and the partial results that return.
        assert row["policies"] == {"no profile": row["auto"]}
        assert row["auto"] == ("pass_q" if row["miss_rate"] < 2 * 2 * 8 / (8 * 8 + 8 * (8 + 1)) else "pass_kv")
    # A ring of two: each rank sends the keys and values it holds, cached ones too, in the first layer; 2 heads of 8.
    # Of the last layer the one query whose result is read goes round: 8 heads of 8.
    for row in report["rows"][::2]:
        assert sum(sent["pass_kv"] for sent in row["bytes_sent"]) == 300 * 2 * 2 * 8 * 4
        assert sum(sent.get("pass_q", 0) for sent in row["bytes_sent"]) == 8 * 8 * 4
    # Or all its new queries in the first layer.
    for row in report["rows"][1::2]:
        assert sum(sent.get("pass_q", 0) for sent in row["bytes_sent"]) == (row["new_tokens"] + 1) * 8 * 8 * 4

    summary = report["summary"]
    assert summary["cells"] == 3 and summary["equation_1_miss_rate"] == 0.5 and summary["not_measured"] == {}
    points = summary["rates"]["free"]["speed_ratio"]
    assert [point["miss_rate"] for point in points] == [0.03, 0.4, 1.0]
    regrets = []
    for index, point in enumerate(points):
        kv, q = (row["seconds"] for row in report["rows"][2 * index : 2 * index + 2])
        speed = sorted(b / a for a, b in zip(kv, q, strict=True))[1]
        assert point["value"] == pytest.approx(speed) and point["low"] <= point["value"] <= point["high"]
        regrets.append(max(0.0, (1 / speed if point["auto"] == "pass_kv" else speed) - 1))
    assert summary["auto_mean_regret"] == pytest.approx(sum(regrets) / 3)
    assert summary["policies"]["no profile"]["auto_mean_regret"] == summary["auto_mean_regret"]
    bounds = summary["intervals"]["auto_mean_regret"]
    assert 0 <= bounds["low"] <= bounds["high"] < math.inf
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "Speed of pass-KV" in done.stdout and "auto_mean_regret" in done.stdout
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["multiturn.json", "multiturn.png"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--ranks", "1"], "--ranks 1"),
        (["--ranks", "2", "--context", "512"], "--miss-rates 0.5 of --context 512"),
        (["--ranks", "2", "--miss-rates", "5,120"], "--miss-rates 5,120"),
        (["--ranks", "2", "--miss-rates", "some"], "--miss-rates some"),
        (["--ranks", "2", "--rates", "free,fast"], "fast"),
        (["--ranks", "2", "--pairs", "9", "--most-pairs", "8"], "--most-pairs 8"),
    ],
)
def test_impossible_arguments_are_refused_at_once(argv: list[str], named: str) -> None:
    assert named in refusal("multiturn.py", argv)


def noisy(seconds: float, rounds: int = 9, spread: float = 0.002) -> list[float]:
    return list(seconds * np.random.default_rng(random.getrandbits(32)).uniform(1 - spread, 1 + spread, rounds))


def cell(miss_rate: float, kv: float, q: float, chosen: str) -> Case:
    return Case(miss_rate, {"pass_kv": noisy(kv), "pass_q": noisy(q)}, chosen)


def test_verdict_counts_only_cells_that_differ() -> None:
    cells = [
        cell(0.01, 2.0, 1.0, "pass_q"),  # right
        cell(0.10, 1.0, 1.01, "pass_q"),  # wrong, but as good
        cell(0.50, 1.0, 1.2, "pass_q"),  # wrong
        cell(1.00, 1.0, 3.0, "pass_kv"),  # right
    ]
    found = judge(cells)
    assert found["cells"] == 4 and found["differing_cells"] == 3
    assert found["auto_right_share"] == pytest.approx(2 / 3)
    assert found["auto_mean_regret"] == pytest.approx((0.01 + 0.2) / 4, abs=0.003)
    bounds = found["intervals"]["auto_mean_regret"]
    assert bounds["low"] <= found["auto_mean_regret"] <= bounds["high"] <= 0.06


def test_drift_of_the_machine_is_no_regret() -> None:
    drift = np.linspace(1, 3, 9)
    unclear = np.array([0.9, 1.2, 0.95, 1.1, 1.05, 0.8, 1.3, 1.04, 1.06])
    clear = np.full(9, 1.03)
    for ratio in (unclear, clear):
        found = judge([Case(0.1, {"pass_kv": list(drift), "pass_q": list(drift * ratio)}, "pass_q")])
        assert found["auto_right_share"] == 0
        assert found["auto_mean_regret"] == pytest.approx(np.median(ratio) - 1)


def test_no_cell_differs() -> None:
    found = judge([cell(0.1, 1.0, 1.005, "pass_q"), cell(0.2, 1.0, 1.0, "pass_kv")])
    assert found["auto_right_share"] is None and found["differing_cells"] == 0
    assert 0 <= found["auto_mean_regret"] < 0.01


def test_interval_of_the_regret_covers_the_truth() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(40):
        cells = []
        for _ in range(4):
            base = rng.uniform(1, 2, 11)
            slow, fast = (base * factor * rng.normal(1, 0.02, 11) for factor in (1.3, 1.0))
            cells.append(Case(0.1, {"pass_kv": list(slow), "pass_q": list(fast)}, "pass_kv"))
        bounds = judge(cells)["intervals"]["auto_mean_regret"]
        covered += bounds["low"] <= 0.3 <= bounds["high"]
    assert covered >= 34


def test_crossover_is_found_between_cells_in_any_order() -> None:
    # Equal where the miss rate is 6%, and pass-Q 1% per doubling faster below.
    rates = [0.5, 0.01, 0.03, 0.12, 1.0]
    cells = [cell(rate, 1.0, (rate / 0.06) ** 0.5, "pass_q") for rate in rates]
    found = crossover(cells)
    assert found["value"] == pytest.approx(0.06, rel=0.02)
    assert 0.055 < found["low"] <= found["value"] <= found["high"] < 0.065


def test_crossover_outvotes_a_single_odd_cell() -> None:
    ratios = {0.01: 0.7, 0.02: 1.02, 0.04: 0.8, 0.2: 1.3, 0.5: 1.6}
    found = crossover([cell(rate, 1.0, ratio, "pass_q") for rate, ratio in ratios.items()])
    assert 0.04 < found["value"] < 0.2


@pytest.mark.parametrize(("ratio", "faster"), [(1.5, "pass_kv"), (0.6, "pass_q")])
def test_no_crossover_where_one_is_always_faster(ratio: float, faster: str) -> None:
    found = crossover([cell(rate, 1.0, ratio, faster) for rate in (0.01, 0.1, 1.0)])
    assert found["value"] is None and found["always"] == faster
