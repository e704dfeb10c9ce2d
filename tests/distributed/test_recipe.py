"""A recipe's run script starts real ranks: on this host, from a hostfile, and none for a dry run."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, Result, run_command
from tests.distributed.models import prose, save_model

RECIPES = ROOT / "recipes"
RECIPE = "llama_7b_mqa"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The run scripts and one recipe, with the environment of this process in place of set-up."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    (root / "scripts" / "setup.sh").write_text(":\n")
    (root / "launcher").symlink_to(ROOT / "launcher")
    folder = root / "recipes" / RECIPE
    folder.mkdir(parents=True)
    for path in (RECIPES / "run.sh", *(RECIPES / RECIPE).iterdir()):
        (root / "recipes" / path.relative_to(RECIPES)).write_bytes(path.read_bytes())
    return root


def run(checkout: Path, *words: str | Path) -> Result:
    """The recipe's own script."""
    return run_command(["bash", checkout / "recipes" / RECIPE / "run.sh", *words], timeout=240).check()


@pytest.mark.parametrize("hostfile", [False, pytest.param(True, marks=pytest.mark.full)])
def test_ranks_read_a_prompt(checkout: Path, tmp_path: Path, hostfile: bool) -> None:
    """With a configuration of its own folder: a bare name is looked for there."""
    model, prompt, out = save_model(tmp_path / "model"), tmp_path / "prompt.txt", tmp_path / "out.json"
    prompt.write_text(prose(53))
    settings = {"dtype": "fp32", "megakv": {"context_parallel": {"size": 2}}}
    (checkout / "recipes" / RECIPE / "tiny.json").write_text(json.dumps(settings))
    where: list[str | Path] = []
    if hostfile:
        (tmp_path / "hosts").write_text("localhost slots=2\n")
        where = ["--hostfile", tmp_path / "hosts"]
    words: list[str | Path] = ["--model", model, "--config", "tiny.json", *where, "--prompt-file", prompt, "--compare"]
    run(checkout, *words, "--max-new-tokens", "3", "--json", out)
    outcome = json.loads(out.read_text())
    assert outcome["tokens_equal"] is True and outcome["mesh"] == {"cp": 2, "tp": 1}
    assert (outcome["prompt_tokens"], outcome["new_tokens"]) == (53, 3)


@pytest.mark.full
def test_dry_run_starts_none(checkout: Path) -> None:
    result = run(checkout, "--dry-run", "--config", "kvr_cp4.json")
    assert "CP 4 x TP 1" in result.stdout and "all shapes fit, all shards add up" in result.stdout
    assert "fits: at most " in result.stdout and "CP 8" not in result.stdout
