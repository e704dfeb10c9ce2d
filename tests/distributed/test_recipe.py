"""A recipe's run script starts real ranks on this host, and none for a dry run; tests/hosts gives it a hostfile."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import ROOT, Result, run_command
from tests.distributed.models import prose, save_model

RECIPES = ROOT / "recipes"
RECIPE = "llama_7b_mqa"


def make_checkout(folder: Path) -> Path:
    """The run scripts and one recipe, with the environment of this process in place of set-up; gives its run.sh."""
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts" / "setup.sh").write_text(":\n")
    (folder / "launcher").symlink_to(ROOT / "launcher")
    recipe = folder / "recipes" / RECIPE
    recipe.mkdir(parents=True)
    for path in (RECIPES / "run.sh", *(RECIPES / RECIPE).iterdir()):
        (folder / "recipes" / path.relative_to(RECIPES)).write_bytes(path.read_bytes())
    settings = {"dtype": "fp32", "megakv": {"context_parallel": {"size": 2}}}
    (recipe / "tiny.json").write_text(json.dumps(settings))
    return recipe / "run.sh"


def words_of_a_run(folder: Path) -> list[str]:
    """Arguments for a tiny model; a configuration's bare name is looked for in the recipe; out.json is the outcome."""
    prompt = folder / "prompt.txt"
    prompt.write_text(prose(53))
    words = ["--model", save_model(folder / "model"), "--config", "tiny.json", "--prompt-file", prompt, "--compare"]
    return [*map(str, words), "--max-new-tokens", "3", "--json", str(folder / "out.json")]


def check_outcome(folder: Path, prompt_tokens: int = 53) -> dict[str, Any]:
    """Two ranks read the prompt and generated what one process does."""
    outcome: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert outcome["tokens_equal"] is True and outcome["mesh"] == {"cp": 2, "tp": 1}
    assert (outcome["prompt_tokens"], outcome["new_tokens"]) == (prompt_tokens, 3)
    return outcome


def run(script: Path, *words: str) -> Result:
    """The recipe's own script."""
    return run_command(["bash", script, *words], timeout=240).check()


def test_ranks_read_a_prompt(tmp_path: Path) -> None:
    run(make_checkout(tmp_path / "checkout"), *words_of_a_run(tmp_path))
    check_outcome(tmp_path)


@pytest.mark.full
def test_dry_run_starts_none(tmp_path: Path) -> None:
    result = run(make_checkout(tmp_path / "checkout"), "--dry-run", "--config", "kvr_cp4.json")
    assert "CP 4 x TP 1" in result.stdout and "all shapes fit, all shards add up" in result.stdout
    assert "fits: at most " in result.stdout and "CP 8" not in result.stdout
