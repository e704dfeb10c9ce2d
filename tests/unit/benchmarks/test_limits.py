"""benchmarks/limits.py: a tiny real run, and what is refused."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.unit.benchmarks.running import refusal, run_benchmark

run = partial(run_benchmark, "limits.py")


@pytest.mark.drawn("benchmarks")
def test_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    done = run(
        "--parts", "attention", "--keys", "64,100", "--head-dims", "20", "--heads", "5", "--groups", "1,2",
        "--dtypes", "fp32,bf16", "--threads", "1", "--repeats", "2", "--matrix", "64", "--json", path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    rows = report["rows"]
    assert [(row["dtype"], row["heads"], row["kv_heads"], row["keys"]) for row in rows] == [
        (dtype, heads, kv_heads, keys)
        for dtype in ("fp32", "bf16") for heads, kv_heads in ((5, 5), (4, 2)) for keys in (64, 100)
    ]  # fmt: skip
    for row in rows:
        assert row["flops"] == sum(4 * 20 * row["heads"] * (token + 1) for token in range(row["keys"]))
        assert len(row["seconds"]) == len(row["torch_seconds"]) == len(row["matrix_seconds"]) == 2
        assert ("torch_float32_seconds" in row) == (row["dtype"] == "bf16")
        rate, seconds = row["flops"] / row["matrix_flops"], zip(row["seconds"], row["matrix_seconds"], strict=True)
        shares = [rate * matrix / own for own, matrix in seconds]
        assert min(shares) <= row["share"]["value"] <= max(shares)
    for kind in ("fp32", "bf16"):
        shares = [row["share"]["value"] for row in rows if row["dtype"] == kind]
        assert report["summary"]["attention_share"][kind] == min(shares)
    assert "4:2 heads of 20" in done.stdout and "attention_share" in done.stdout


@pytest.mark.drawn("benchmarks")
def test_rates_of_products_are_bytes_by_seconds(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    done = run(
        "--parts", "products", "--weights-mb", "1", "--dtypes", "bf16", "--threads", "1", "--repeats", "2",
        "--json", path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    for row in report["rows"]:
        weight = 2 * row["outputs"] * row["inputs"]
        assert row["bytes"] == weight * max(1, 2**20 // weight) and row["read_bytes"] == 2**20
        rates = [row["bytes"] / each / 1e9 for each in row["seconds"]]
        assert min(rates) <= row["gb_per_s"] <= max(rates)
    assert report["summary"]["products_share"]["bf16"] == min(row["share"]["value"] for row in report["rows"])


@pytest.mark.full
def test_a_token_beside_transformers_own(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    done = run(
        "--parts", "around", "--context", "50", "--dtypes", "bf16", "--threads", "1", "--repeats", "1", "--json", path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    small, long, *questions = json.loads(path.read_text())["rows"]
    assert small["ratio"]["value"] == pytest.approx(small["seconds"][0] / small["plain_seconds"][0])
    assert len(long["in_place_seconds"]) == 1 and [row["case"][-2:] for row in questions] == ["12", "48"]


@pytest.mark.full
def test_a_token_of_two_ranks_beside_one_s(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    asked = ["--parts", "decoding", "--context", "50", "--dtypes", "bf16", "--batches", "1,3", "--repeats", "1"]
    done = run(*asked, "--json", path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    row, other = report["rows"]
    assert (row["batch"], other["batch"]) == (1, 3)
    assert row["ratio"]["value"] == pytest.approx(row["cp2_seconds"][0] / row["seconds"][0])
    assert report["summary"]["ttit_cp2_over_one"] == {"bf16": row["ratio"]["value"]}
    assert list(report["summary"]["step_cp2_over_one"]) == ["bf16, batch 1", "bf16, batch 3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "nothing"], "--parts nothing: allowed: each of attention, products, around, decoding once"),
        (["--heads", "4"], "--heads 4 is less than --groups 8"),
        (["--keys", "0"], "--keys 0: allowed: whole numbers from 1 on"),
    ],
)
def test_impossible_arguments(arguments: list[str], message: str) -> None:
    assert message in refusal("limits.py", arguments)
