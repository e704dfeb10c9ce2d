"""``megakv fairkv place`` from prompts to a run's JSON, on real ranks, and nothing left behind where one is killed."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megakv.engine.config import load_config
from megakv.fairkv.mapping import load_mapping
from megakv.fairkv.profile import load_budgets
from megakv.tracking.report import load_report
from tests.distributed.launch import GRACE_S, ROOT, run_command, run_ranks
from tests.distributed.models import prose, save_model
from tests.patience import Patience, alive_after, status_within

SCRIPT = ROOT / "launcher" / "mapping_ranks.py"
START_S = 120


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prose(words)) + "\n" for words in (170, 141, 203)))
    return path


def test_from_prompts_to_a_run(tmp_path: Path, prompts: Path) -> None:
    model, out, config = save_model(tmp_path / "model"), tmp_path / "made" / "out", tmp_path / "config.json"
    config.write_text(json.dumps({"dtype": "fp32", "megakv": {"seed": 3, "fairkv": {"budget": 0.5, "window": 8}}}))
    words = ["fairkv", "place", model, "--prompts", prompts, "--tp", 2, "--config", config, "--out", out]
    words += ["--max-new-tokens", 5]
    done = run_command([sys.executable, "-m", "megakv", *map(str, words)], timeout=240).check()
    result = json.loads((out / "result.json").read_text())
    assert result["tokens_equal"] is True and result["mesh"] == {"cp": 1, "tp": 2} and result["copies"] == 1
    # Of three prompts the first and the last make the profile.
    profile = load_budgets(out / "budgets.json")
    assert profile.lengths == (170, 203) and result["prompts"] == {"profile": 2, "compared": 1}
    mapping = load_mapping(out / "mapping.json")
    assert mapping.tp_size == 2 and mapping.copies == 1 and mapping.identity == profile.identity
    placements = result["placements"]
    # Five tokens are four steps, each read twice.
    assert {name: len(values["samples_s"]) for name, values in placements.items()} == {"contiguous": 8, "mapped": 8}
    # Of a prompt that the mapping was not made for, either may be the greater.
    assert all(0 < values["utilisation"] <= 1 for values in placements.values())
    reports = {name: load_report(out / f"{name}.json") for name in placements}
    assert reports["contiguous"].balance.mapping is None  # type: ignore[union-attr]
    assert reports["mapped"].balance.mapping == str(out / "mapping.json")  # type: ignore[union-attr]
    assert reports["mapped"].answers[0].tokens == reports["contiguous"].answers[0].tokens
    run = load_config(out / "config.json")
    fairkv = run.megakv.fairkv
    assert (run.tp_size, run.megakv.seed, fairkv.budget, fairkv.window) == (2, 3, 0.5, 8)  # type: ignore[attr-defined]
    assert fairkv.mapping == (str(out / "mapping.json") if result["taken"] else None)
    assert result["predicted_gain"]["attention_tokens"] > 1 and done.stdout.endswith(f"result: {result['result']}\n")
    page = (out / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and result["result"] in page and "mapped / contiguous" in page
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("budgets.png", "mapping.png"))


def test_a_profile_of_before_and_a_mapping_that_promises_nothing(tmp_path: Path, prompts: Path) -> None:
    model, out = save_model(tmp_path / "model"), tmp_path / "out"
    budgets = tmp_path / "budgets.json"
    budgets.write_text(json.dumps({"model": "model", "budgets": [[30, 40, 40, 30]] * 2}))
    words = ["--model", model, "--prompts", prompts, "--tp", "2", "--dtype", "fp32", "--budgets", budgets, "--out", out]
    done = run_ranks(SCRIPT, *words, "--copies", "0", ranks=2, timeout=120).check()
    result = json.loads((out / "result.json").read_text())
    assert result["declined"] and not result["taken"] and result["placements"] == {}
    assert "result: leave the heads alone: " in done.stdout
    assert load_config(out / "config.json").megakv.fairkv.mapping is None
    assert not (out / "page.html").exists() and not (out / "budgets.json").exists()


@pytest.mark.drawn("ends")
def test_a_killed_rank_ends_all(tmp_path: Path, prompts: Path) -> None:
    model = save_model(tmp_path / "model")
    words = ["fairkv", "place", model, "--prompts", prompts, "--tp", 2, "--max-new-tokens", 200]
    command = [sys.executable, "-m", "megakv", *map(str, [*words, "--repeats", 999, "--out", tmp_path / "out"])]
    said = tmp_path / "said.txt"
    family: list[psutil.Process] = []
    with open(said, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT)
    try:
        patience = Patience(START_S)
        # Once there is a mapping, the second engine is made and both read.
        while not (tmp_path / "out" / "mapping.png").exists():
            assert process.poll() is None and not patience.over, said.read_text()
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = [each for each in family if "megakv.launcher.mapping_ranks" in each.cmdline() and not each.children()]
        ranks[-1].kill()
        status_within(60, process)
    finally:
        process.kill()
        alive = alive_after(GRACE_S, family)
        for left in alive:
            left.kill()
    assert not alive, alive
    # Which of the two depends on whether the other waited in an exchange that never hears of a peer's end.
    told = re.search(r"megakv: (error: |rank 0 ends because )", said.read_text())
    assert process.returncode == 1 and told, said.read_text()
    assert "Traceback" not in said.read_text(), said.read_text()
