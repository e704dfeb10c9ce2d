"""benchmarks/quality.py: a run of a tiny model, its scores, and what is kept of a prompt that others have read."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.harness.methods import Peers
from benchmarks.harness.quality.answers import Batch, load_model, ways_of
from benchmarks.harness.quality.ruler import (
    ALL,
    EXACT,
    METHODS,
    Item,
    by_length,
    compare_tokens,
    read_items,
    rows_of,
    share,
)
from benchmarks.harness.world import World
from megakv.fairkv import methods
from tests.unit.benchmarks.running import fork_benchmark

MODEL = Path(__file__).resolve().parents[3] / "recipes" / "passkey" / "model"
WORDS = "the grass is green sky blue sun yellow here we go there and back again".split()


def text(words: int) -> str:
    return " ".join(random.choices(WORDS, k=words)) + " The number is"


def test_scores() -> None:
    item = Item("vt", 4096, "", ("AB", "cd", "EF", "gh"))
    assert item.score("x ab, EF") == 0.5 and item.score("abcdefgh") == 1 and item.score("") == 0
    assert sorted(METHODS) == sorted(methods.METHODS)
    # Wilson's interval of 8 out of 10, as tables have it.
    found = share([1] * 8 + [0] * 2)
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert (share([1.0] * 4).low, share([1.0] * 4).high) == (pytest.approx(0.5101, abs=1e-4), 1.0)


def test_rows_and_summary() -> None:
    def answers(*scores: float) -> list[dict[str, float]]:
        return [{"score": score, "kept": 10, "tokens": 40} for score in scores]

    rows = rows_of(
        {
            "compressed-64-vt-0": {EXACT: answers(1, 1), "h2o-10": answers(0, 1), "snapkv-10": answers(1, 0.5)},
            "compressed-64-vt-2": {EXACT: answers(1), "h2o-10": answers(1), "snapkv-10": answers(0.5)},
            "compressed-64-fwe-0": {EXACT: answers(0)},
        }
    )
    cells = {(row["method"], row["budget"], row["task"]): row for row in rows}
    assert cells[EXACT, None, ALL]["score"]["value"] == 0.75 and cells[EXACT, None, "fwe"]["items"] == 1
    assert cells["h2o", 10, "vt"]["scores"] == [0, 1, 1] and cells["h2o", 10, ALL]["kept"] == 0.25
    summary = by_length(rows)
    assert {name: cell["value"] for name, cell in summary["accuracy"]["64"]["10"].items()} == {
        "snapkv": pytest.approx(2 / 3), "h2o": pytest.approx(2 / 3)
    }  # fmt: skip
    tokens = {"exact-1-64-vt-0": {"a": [1, 2], "b": [1, 2]}, "exact-2-64-vt-0": {"b": [1, 2]}}
    tokens |= {"exact-1-64-vt-1": {"a": [1], "b": [1]}, "exact-2-64-vt-1": {"b": [3]}, "exact-1-64-vt-2": {"a": [1]}}
    found = compare_tokens(tokens)
    assert (found["exact_items"], found["exact_equal"], found["exact_different"]) == (2, 1, ["64-vt-1"])
    assert compare_tokens({})["exact_items"] == 0


def test_shared_reading_is_like_reading_whole(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    """A method answers from a prompt that others have read as from one that it reads itself."""
    monkeypatch.setattr("benchmarks.harness.quality.answers.PIECE_TOKENS", 150)
    model, _ = load_model(str(MODEL), "fp32")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    items = [Item("fwe", 200, text(words), ("never said",)) for words in (110, 117)]
    ways = [replace(way, importance=None) for way in ways_of(["h2o", "ada_snapkv", EXACT], [40], Path())]
    batch = Batch(items, tokenizer)
    with Peers(model, World(0, 1, torch.device("cpu"))) as peers:
        engines = {way.name: peers.engine(way.name, {}, **way.section) for way in ways}
        shared = batch.compressed(engines, ways[:1]) | batch.compressed(engines, ways[1:])
        for way in ways:
            own = batch.whole(engines[way.name])
            assert [answer.text for answer in own] == [answer.text for answer in shared[way.name]]
            assert all(answer.kept == (40 if way.budget else answer.tokens) for answer in shared[way.name])


@pytest.mark.drawn("benchmarks")
def test_tiny_run(tmp_path: Path) -> None:
    items = [
        {"task": "niah_single_1", "context": context, "text": text(context // 2 - 10), "expected": ["12345"]}
        for context in (160, 240) for _ in range(3)
    ]  # fmt: skip
    (data := tmp_path / "items.json").write_text(json.dumps(items))
    with pytest.raises(ValueError, match="has no cwe of 160 tokens"):
        read_items(data, ["cwe"], [160])
    path, profile = tmp_path / "accuracy.json", tmp_path / "budgets.json"
    # One that is named is not measured; the command that measures it takes longer than all else.
    config = json.loads((MODEL / "config.json").read_text())
    budgets = [[10.0, 20, 30, 40]] * config["num_hidden_layers"]
    profile.write_text(json.dumps({"model": "passkey", "budgets": budgets}))
    asked = ["--ranks", "2", "--model", MODEL, "--data", data, "--context", "160,240", "--json", path]
    asked += ["--tasks", "niah_single_1", "--items", "2", "--exact-items", "1", "--budgets", "40"]
    asked += ["--methods", "headkv,kv4,fp8", "--batch", "2", "--profile", profile, "--scored", "50"]
    done = fork_benchmark("quality.py", *asked)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    summary = report["summary"]
    assert summary["exact_items"] == summary["exact_equal"] == 2 and len(summary["exact_ways"]) == 3
    assert set(summary["accuracy"]["160"]["all"]) == {EXACT, "kv4", "fp8"}
    assert set(summary["accuracy"]["240"]["40"]) == {"headkv"}
    assert set(summary["perplexity_over_exact"]) == {"headkv-40", "kv4", "fp8"}
    assert summary["heads"]["mean_share"][0] == [0.1, 0.2, 0.3, 0.4]
    assert [row["items"] for row in report["rows"] if row["method"] == EXACT and "items" in row] == [2, 2, 1, 1]
    for name in ("accuracy.png", "accuracy.240.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
