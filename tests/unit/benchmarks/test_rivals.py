"""benchmarks/rivals.py with the rivals of the project's own environment, and what its table says of those it lacks."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT
from tests.unit.benchmarks.running import run_benchmark

MODEL = ROOT / "recipes" / "passkey" / "model"


@pytest.mark.drawn("benchmarks")
def test_tiny_run(tmp_path: Path) -> None:
    path = tmp_path / "rivals.json"
    # The model has no GGUF file: llama.cpp cannot be had, here and where its environment was made.
    asked = ["--rivals", "transformers,llama_cpp,megakv_cp2", "--dtypes", "fp32", "--lengths", "24,40"]
    options = ["--model", MODEL, *asked, "--new-tokens", "4", "--repeats", "2", "--slow", "1e9", "--json", path]
    done = run_benchmark("rivals.py", *options, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    rows, summary = report["rows"], report["summary"]
    names = ["transformers", "megakv_cp2"]
    assert [(row["context"], row["rival"]) for row in rows] == [(length, name) for length in (24, 40) for name in names]
    for row in rows:
        assert all(len(row[key]) == 2 and min(row[key]) > 0 for key in ("seconds", "ttit_s", "peak_bytes"))
        assert row["tokens_equal"] and row["equal_tokens"] == 5 and row["ranks"] * row["threads"] == 2
    assert rows[0]["tokens"][0] != rows[0]["tokens"][1], "rounds have prompts of their own"
    assert summary["tokens_equal_fp32"] == dict.fromkeys(names, True)
    assert (
        list(summary["not_run"]) == ["llama_cpp, fp32"] and "llama_cpp, fp32: not measured" in done.stderr + done.stdout
    )
    for measure, key in (("ttft", "seconds"), ("ttit", "ttit_s")):
        over = summary[f"{measure}_over_best_rival"]["fp32"]["40"]
        medians = {row["rival"]: sum(row[key]) / 2 for row in rows if row["context"] == 40}
        assert over["rival"] == "transformers"
        assert over["megakv_cp2"]["value"] == pytest.approx(medians["megakv_cp2"] / medians["transformers"])
        losing = medians["megakv_cp2"] > medians["transformers"]
        unit = {"ttft": "s to the first", "ttit": "ms for each"}[measure]
        assert losing == any("40 tokens" in line and unit in line for line in summary["loses"])
        assert path.with_suffix(f".{measure}.fp32.png").read_bytes().startswith(b"\x89PNG")
