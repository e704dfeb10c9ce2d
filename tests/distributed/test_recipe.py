"""A recipe's run script starts real ranks on this host, and none for a dry run; tests/hosts gives it a hostfile."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from megakv.launcher.run import parse_arguments
from megakv.launcher.settings import check_job_arguments, run_config
from tests.distributed.launch import ROOT, Result, run_command, run_ranks
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


@pytest.mark.drawn("launchers")
def test_ranks_read_a_prompt(tmp_path: Path) -> None:
    run(make_checkout(tmp_path / "checkout"), *words_of_a_run(tmp_path))
    check_outcome(tmp_path)


@pytest.mark.full
def test_dry_run_starts_none(tmp_path: Path) -> None:
    result = run(make_checkout(tmp_path / "checkout"), "--dry-run", "--config", "kvr_cp4.json")
    assert "CP 4 x TP 1" in result.stdout and "all shapes fit, all shards add up" in result.stdout
    assert "fits: at most " in result.stdout and "CP 8" not in result.stdout


def test_a_run_of_the_sweep(tmp_path: Path) -> None:
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    from wandb.sdk.lib.config_util import save_config_file_from_dict

    sweep = utils.load_sweep_config(str(RECIPES / "smollm2" / "sweep.yaml"))
    values = [entry["values"] for entry in sweep["parameters"].values()]
    runs = [
        {name: {"value": value} for name, value in zip(sweep["parameters"], chosen, strict=True)}
        for chosen in itertools.product(*values)
    ]
    start, script, *given, last = sweep["command"]
    assert start == "bash" and (ROOT / script).is_file() and last == "${args}"
    commands = [[*given, *utils.create_sweep_command_args({"args": each})["args"]] for each in runs]
    for words in commands:
        arguments = parse_arguments(["--model", "any", *words])
        check_job_arguments(arguments)
        assert run_config(arguments).megakv.tracking.wandb.enabled

    # What an agent gives the one that it starts: the answer's run is the sweep's.
    index = random.randrange(len(runs))
    parameters, out, prompt = tmp_path / "parameters.yaml", tmp_path / "out.json", tmp_path / "prompt.txt"
    save_config_file_from_dict(str(parameters), runs[index])
    prompt.write_text(prose(700))
    agent = {"WANDB_RUN_ID": "run0of1it", "WANDB_SWEEP_ID": "sweep0id", "WANDB_SWEEP_PARAM_PATH": str(parameters)}
    env = {**agent, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    words = ["--model", save_model(tmp_path / "model", max_position_embeddings=1024), "--cp", "2", "--dtype", "fp32"]
    words += ["--prompt-file", prompt, "--max-new-tokens", "4", "--compare", "--json", out, *commands[index]]
    result = run_ranks(ROOT / "launcher" / "run.py", *words, ranks=2, timeout=120, env=env).check()
    outcome = json.loads(out.read_text())
    assert outcome["tokens_equal"] is True and len(outcome["step_s"]) == outcome["new_tokens"] - 1 == 3
    chosen = runs[index]["prefill"]["value"]
    assert outcome["config"]["megakv"]["context_parallel"]["prefill"] == chosen
    [directory] = tmp_path.glob("wandb/offline-run-*-run0of1it")
    assert f"W&B run: {directory}\n" in result.stdout and f"wandb sync {directory}\n" in result.stdout
    [log] = directory.glob("run-*.wandb")
    content = log.read_bytes()
    expected = ("ttft_s", "ttit_s/p90", "bytes_sent/", "prefill-chunk-size", "sweep0id", chosen, "machine")
    assert all(word.encode() in content for word in expected), [w for w in expected if w.encode() not in content]
    assert len(list(directory.glob("files/media/images/timeline_*.png"))) == 1
