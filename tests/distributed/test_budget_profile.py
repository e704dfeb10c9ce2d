"""``megakv fairkv profile`` on real ranks, and the mapper on what it measured."""

import json
from pathlib import Path

import numpy as np
import pytest

from megakv.fairkv.profile import BudgetProfile, load_budgets
from megakv.launcher.command import main
from tests.distributed.launch import ROOT, run_ranks
from tests.distributed.models import POSITIONS, prose, save_model

MODEL = ROOT / "recipes" / "passkey" / "model"
SCRIPT = ROOT / "launcher" / "budget_ranks.py"


@pytest.fixture
def data_sets(tmp_path: Path) -> list[Path]:
    lines, folder = tmp_path / "lines.jsonl", tmp_path / "folder"
    lines.write_text(json.dumps({"prompt": prose(70)}) + "\n" + json.dumps(prose(190)[::-1]) + "\n")
    folder.mkdir()
    (folder / "one.txt").write_text(prose(120))
    return [lines, folder]


def measure(tmp_path: Path, data_sets: list[Path], cp: int, tp: int) -> tuple[BudgetProfile, str]:
    config, out = tmp_path / "config.json", tmp_path / f"{cp}x{tp}.json"
    fairkv = {"window": 8, "min_tokens": 64}
    section = {"context_parallel": {"size": cp}, "fairkv": {"budget": 0.5, **fairkv}}
    config.write_text(json.dumps({"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}))
    words = ["--model", MODEL, "--prompts", *data_sets, "--config", config, "--budget", "40", "--json", out]
    done = run_ranks(SCRIPT, *words, ranks=cp * tp, timeout=120).check()
    return load_budgets(out), done.stdout


def test_the_profile_does_not_depend_on_the_mesh(tmp_path: Path, data_sets: list[Path]) -> None:
    profile, shown = measure(tmp_path, data_sets, 2, 2)
    assert (profile.n_layers, profile.n_kv_heads, profile.method) == (4, 4, "ada_snapkv")
    assert profile.prompts is not None and profile.lengths is not None and profile.data_sets is not None
    assert [(each.name, each.prompts) for each in profile.data_sets] == [("lines", 2), ("folder", 1)]
    for prompt, length in zip(profile.prompts, profile.lengths, strict=True):
        # A pool of 40 tokens a head in every layer, divided unequally, of whole tokens.
        kept = np.array(prompt)
        assert (kept == kept.round()).all() and (kept.sum(1) == 160).all() and kept.std() > 0
        assert 8 <= kept.min() and kept.max() <= length
    np.testing.assert_allclose(profile.budgets, np.mean(profile.prompts, axis=0))
    assert "Table 1" in shown and "Table 2" in shown and "lines" in shown
    assert (tmp_path / "2x2.png").read_bytes().startswith(b"\x89PNG")
    assert measure(tmp_path, data_sets, 1, 1)[0] == profile
    mapping = tmp_path / "mapping.json"
    words = ["--profile", tmp_path / "2x2.json", "--model", MODEL, "--tp", "4", "--copies", "1", "--json", mapping]
    assert main(["fairkv", "map", *map(str, words)]) == 0
    assert json.loads(mapping.read_text())["barrier_utilisation"] > profile.busy_rates[4]  # type: ignore[index]


def test_prompts_of_impossible_lengths(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    for text, budget, message in (
        (prose(9), "0.25", "the prompt has 9 tokens, fewer than megakv.fairkv.min_tokens = 128"),
        (prose(200), "500", "the prompt has 200 tokens, fewer than --budget 500"),
        (prose(POSITIONS + 1), "0.25", f"the prompt has {POSITIONS + 1} tokens, the model takes {POSITIONS}"),
    ):
        path = tmp_path / "text.txt"
        path.write_text(text)
        words = ["--model", model, "--prompts", path, "--budget", budget, "--json", tmp_path / "out.json"]
        done = run_ranks(SCRIPT, *words, ranks=1, timeout=60)
        assert done.returncode != 0 and f"--prompts {path}: {message}" in done.stderr, done.stderr[-2000:]
