"""benchmarks/serving.py: tiny real runs through the command and HTTP, its traces, and what is refused."""

import json
from functools import partial
from pathlib import Path

import pytest

from benchmarks import serving
from benchmarks.harness.serving.trace import read_trace, unbounded
from tests.distributed.launch import ROOT
from tests.unit.benchmarks.running import refusal, run_benchmark

MODEL = ROOT / "recipes" / "passkey" / "model"
run = partial(run_benchmark, "serving.py", timeout=280)
TINY = (
    "--quick", "--model", MODEL, "--dtype", "fp32", "--requests", "8", "--longest", "60", "--prompt", "300",
    "--streams", "2", "--trace-requests", "4", "--concurrent", "1,3", "--short", "20", "--new-tokens", "4",
)  # fmt: skip


@pytest.mark.drawn("benchmarks")
def test_answers_and_throughput(tmp_path: Path) -> None:
    path = tmp_path / "serving.json"
    done = run("--parts", "answers,throughput", *TINY, "--json", path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    rows, summary = report["rows"], report["summary"]
    answers = [row for row in rows if row["part"] == "answers"]
    assert len(answers) == 8 and summary["answers"]["tokens"] == sum(row["compared"] for row in answers)
    assert summary["answers_equal"] or summary["answers"]["differing_at_near_ties"], answers
    rates = [row for row in rows if row["part"] == "throughput"]
    assert [(row["streams"], row["sampled"]) for row in rates] == [(1, False), (1, True), (3, False), (3, True)]
    assert all(answer["tokens"] == 4 for row in rates for answer in row["answers"])
    over = rates[2]["tokens_per_second"] / rates[0]["tokens_per_second"]
    assert rates[3]["tokens_per_second"] / rates[2]["tokens_per_second"] == summary["sampled_over_greedy"]["3"]
    assert summary["throughput_over_one"] == {"1": 1.0, "3": pytest.approx(over)}


@pytest.mark.full
def test_all_other_parts(tmp_path: Path) -> None:
    path, trace = tmp_path / "serving.json", tmp_path / "trace.jsonl"
    blocks = [0, 1, 2], [0, 1, 3], [0, 4, 5], [0, 6]
    lines = [{"input_length": 1500, "output_length": 40, "hash_ids": ids} for ids in blocks]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = run("--parts", "gaps,trace,returns,restart,memory", "--trace", trace, *TINY, "--json", path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    parts = {name: [row for row in report["rows"] if row["part"] == name] for name in report["args"]["parts"]}
    assert [row["decode_share"] for row in parts["gaps"]] == [0.0, 0.54]
    assert all(row["longest_gap"] == max(max(each) for each in row["gaps"]) for row in parts["gaps"])
    assert report["summary"]["computed_over_unbounded_cache"] == 1.0
    (returned,), (restarted,) = parts["returns"], parts["restart"]
    assert returned["cached_tokens"][0] >= 0.9 * 300 and restarted["cached_tokens"] == [299]
    assert restarted["tokens_equal"] == [True] and restarted["ranks_after"] == 1
    assert parts["memory"][-1]["requests"] == 20 and len(parts["memory"][-1]["rss"]) == 2


def test_a_trace_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 5]}
    path.write_text(f"{json.dumps(line)}\n" * 3 + "{}\n")
    assert [(each.length, each.output, each.blocks) for each in read_trace(path, 2)] == [(700, 3, (0, 5))] * 2
    with pytest.raises(ValueError, match="line 4 is none of Mooncake's"):
        read_trace(path, 4)


def test_an_unbounded_cache_has_all_beginnings() -> None:
    assert unbounded([[1, 2, 3], [1, 2, 3], [1, 2, 4, 5], [7], [1, 2, 3, 4]]) == [3, 1, 2, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "nothing"], "--parts nothing: allowed: each of answers, gaps"),
    ],
)
def test_impossible_arguments(arguments: list[str], message: str) -> None:
    assert message in refusal("serving.py", arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "--model nowhere: there is no config.json"),
        (["--model", str(MODEL), "--prompt", "20000"], "--prompt 20000: the model's positions leave 16128"),
    ],
)
def test_what_a_model_cannot_do(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serving.run(serving.parse_arguments(arguments))
