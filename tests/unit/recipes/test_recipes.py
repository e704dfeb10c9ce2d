"""Every recipe runs without weights, fits its machine, and its README says what the cost model says."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from megakv.engine.config import load_config
from recipes.common.catalogue import RECIPES, find_run, load_recipe, names
from recipes.common.dry_run import main
from recipes.common.forecast import forecast
from recipes.common.plans import accelerators, planned
from recipes.common.readme import document, seconds

MODELS = {
    "falcon_1b",
    "falcon_7b",
    "llama2_13b",
    "llama2_7b",
    "llama3_3_70b",
    "llama3_405b",
    "llama3_8b",
    "llama_13b",
    "llama_30b",
    "llama_7b",
    "llama_7b_gqa8",
    "llama_7b_mqa",
    "mistral_small_24b",
    "opt_13b",
    "opt_30b",
    "opt_6_7b",
}


def test_every_model_of_the_papers_has_a_recipe() -> None:
    assert set(names()) == MODELS


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", names())
def test_dry_run_fits_and_readme_is_fresh(name: str) -> None:
    written = (RECIPES / name / "README.md").read_text()
    assert document(name) == written, "python -m recipes.common.readme writes it anew"


@pytest.mark.parametrize("name", names())
def test_every_config_has_a_purpose(name: str) -> None:
    configs = {path.name for path in (RECIPES / name).glob("*.json")} - {"config.json", "recipe.json"}
    assert configs == {run.config for run in load_recipe(name).runs}
    for config in configs:
        load_config(RECIPES / name / config)


@pytest.mark.parametrize("name", names())
def test_runs_are_named_for_what_they_are(name: str) -> None:
    for run in load_recipe(name).runs:
        section = load_config(RECIPES / name / run.config).megakv
        # FairKV maps heads; KVR-S takes partitions that were searched.
        assert ("fairkv" in run.config) == (section.fairkv.mapping is not None), run.config
        assert "KVR-S" not in run.purpose or section.runahead.table is not None, run.config


@pytest.mark.parametrize("name", names())
def test_planned_configs_are_what_the_planner_says(name: str) -> None:
    runs = [run for run in load_recipe(name).runs if accelerators(run) is not None]
    assert runs
    for run in runs:
        written = json.loads((RECIPES / name / run.config).read_text())
        assert planned(name, run) == written, "python -m recipes.common.plans writes it anew"


def test_the_papers_headline_is_predicted() -> None:
    run = find_run(load_recipe("llama3_405b"), "cp16_tp8.json")
    assert run.published_ttft_s == 77
    assert forecast("llama3_405b", run).ttft_s == pytest.approx(77, rel=0.15)


def test_unknown_recipes_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama_7c"]) == 1
    assert "recipe 'llama_7c' is not one of falcon_1b, " in capsys.readouterr().err
    assert main(["opt_13b", "--config", "none.json"]) == 1
    assert "config 'none.json' is not one of " in capsys.readouterr().err


def test_times_are_rounded() -> None:
    assert [seconds(value) for value in (77.42, 5.678, 0.4567, 0.0123, 0.999)] == [
        "77 s", "5.7 s", "460 ms", "12 ms", "1000 ms",
    ]  # fmt: skip


def test_run_script_says_what_is_missing(tmp_path: Path) -> None:
    """Without set-up: the environment of this process serves."""
    folder = tmp_path / "recipes" / "llama_7b"
    folder.mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup.sh").write_text(":\n")
    for source, target in ((RECIPES / "run.sh", folder.parent), (RECIPES / "llama_7b" / "run.sh", folder)):
        (target / "run.sh").write_bytes(source.read_bytes())
    for path in (RECIPES / "llama_7b").glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())

    def run(*words: str) -> tuple[int, str]:
        command = ["bash", str(folder / "run.sh"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stderr

    status, said = run("--help")
    assert status == 0 and said == ""
    status, said = run("--config", "kvr_cp5.json", "--dry-run")
    assert status == 1 and "--config kvr_cp5.json is no file here; llama_7b has: kvr_cp4.json kvr_cp8.json" in said
    assert run()[0] == 1 and "--model DIR is missing: llama_7b holds no weights" in run()[1]
    assert "--config needs a value" in run("--config")[1]
    broken = folder / "broken.json"
    broken.write_text(json.dumps({"nonsense": 1}))
    status, said = run("--model", str(tmp_path), "--config", "broken.json")
    assert status == 1 and "nonsense = 1: unknown key" in said


@pytest.mark.parametrize("shell", ["dash", "zsh"])
def test_set_up_names_bash_to_other_shells(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    for words in (["-c", ". scripts/setup.sh || echo refused >&2"], ["scripts/setup.sh"]):
        done = subprocess.run([shell, *words], capture_output=True, text=True, timeout=60, cwd=RECIPES.parent)
        assert done.stderr.startswith("megakv set-up: this is for bash."), done
        assert "substitution" not in done.stderr and ("refused" in done.stderr or done.returncode == 1)
