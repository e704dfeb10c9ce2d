"""The commands plan and simulate: what they write and print, and what they refuse."""

import json
from pathlib import Path

import pytest

from docs.generated import ROOT
from megakv.engine.config import load_config
from megakv.launcher.command import main
from tests.unit.planner.test_cluster import LARGE

PLAN = ["plan", "--context", "60000", "--gpus", "8"]
SIMULATE = ["simulate", "--context", "4096", "--hardware", "cpu", "--cp", "2", "--method", "pass_kv"]


def test_plan_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, config = tmp_path / "plan.json", tmp_path / "run.json"
    model = str(ROOT / "recipes" / "llama3_8b")
    files = ["--json", str(out), "--config", str(config)]
    assert main([*PLAN, "--model", model, "--hardware", "h100-rdma", "--explain", *files]) == 0
    shown = capsys.readouterr().out
    values = json.loads(out.read_text())
    best = values["best"]
    assert best == values["choices"][0] | {"config": json.loads(config.read_text())}
    assert best["name"] in shown and "attention " in shown and "memory: weights" in shown
    several = [choice["mesh"]["cp_size"] * choice["mesh"]["tp_size"] > 1 for choice in values["choices"]]
    assert [bool(choice["sent_bytes"]) for choice in values["choices"]] == several and "a rank sends " in shown
    # The model of the recipe has fewer positions.
    assert "note: the model's config names 8,192 positions" in shown and values["positions"] == 8192
    assert load_config(config).cp_size == best["mesh"]["cp_size"]
    assert values["demand"]["context"] == 60000 and values["evaluated"] >= len(values["choices"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PLAN, "--model", "recipes/llama3_8b", "--hardware", "h100-rmda"], "did you mean 'h100-rdma'"),
        (
            [*PLAN, "--model", "recipes/lama3_8b", "--hardware", "cpu"],
            "there is no 'recipes/lama3_8b'; did you mean recipes/llama3_8b",
        ),
        ([*PLAN, "--model", "/no/such", "--hardware", "cpu"], "--model: no model config in '/no/such'"),
        ([*PLAN[:-1], "-3", "--model", "recipes/llama3_8b", "--hardware", "cpu"], "--gpus -3: allowed: 1 to"),
        (
            [*SIMULATE, "--model", "recipes/llama3_8b", "--tp", "3"],
            "--tp 3: allowed for this model: 1, 2, 4, 8, 16, 32",
        ),
        ([*SIMULATE, "--model", "recipes/llama3_8b", "--slow-rank", "7:2"], "rank 7: allowed: 0 to 1"),
        ([*SIMULATE, "--model", "recipes/llama3_8b", "--slow-rank", "x"], "--slow-rank x: allowed: R:FACTOR"),
        ([*SIMULATE, "--model", "recipes/llama3_8b", "--slow-link", "0:2"], "--slow-link 0:2: allowed: A-B:FACTOR"),
        ([*SIMULATE, "--model", "recipes/llama3_8b", "--layers", "33"], "--layers 33: allowed: 1 to 32"),
        ([*SIMULATE, "--model", "recipes/llama3_8b", "--noise", "-1"], "noise -1.0: allowed"),
        ([*SIMULATE, "--model", "recipes/llama3_8b", "--batch", "0"], "--batch 0: allowed: 1 to"),
    ],
)
def test_what_cannot_be_planned_or_simulated(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_a_recipe_whose_runs_are_fp8_is_planned_exactly(tmp_path: Path) -> None:
    out = tmp_path / "out" / "plan.json"
    command = ["plan", "--model", str(LARGE), "--context", "1000000", "--gpus", "128"]
    for more, fp8 in ((), False), (("--allow-lossy",), True):
        assert main([*command, "--hardware", "h100-rdma", "--json", str(out), *more]) == 0
        plan = json.loads(out.read_text())
        assert any(choice["fit"]["fp8"] for choice in plan["choices"]) is fp8
        assert ("weights" in plan["best"]["config"]["megakv"]) is fp8
