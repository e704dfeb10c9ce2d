"""Budget profiles on disk: checked before anything is mapped by them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megakv.fairkv.profile import BudgetProfile, load_budgets
from tests.unit.fairkv.instances import skewed


def whole() -> dict[str, Any]:
    rows = [[8.0, 2.0, 6.0], [4.0, 4.0, 4.0]]
    return {
        "model": "org/Model-1B",
        "budgets": rows,
        "prompts": [rows, rows],
        "lengths": [9, 10],
        "method": "ada_snapkv",
    }


def test_written_by_hand(tmp_path: Path, write_json: Callable[[str, Any], Path]) -> None:
    """Model and budgets suffice; what is saved says what it is."""
    rows = skewed(3, 5)
    profile = load_budgets(write_json("p.json", {"model": "m", "budgets": rows}))
    assert (profile.n_layers, profile.n_kv_heads) == (3, 5)
    assert [list(row) for row in profile.budgets] == rows
    profile.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text())["format"] == "megakv budget profile"
    assert load_budgets(tmp_path / "again.json") == profile


def test_all_fields(write_json: Callable[[str, Any], Path]) -> None:
    profile = load_budgets(write_json("p.json", whole()))
    assert profile.prompts is not None and len(profile.prompts) == 2
    assert profile.lengths == (9, 10) and profile.method == "ada_snapkv"


def _with(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values | changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with(format="megakv hardware profile"), "is not a megakv budget profile"),
        (lambda v: [v], "is not a megakv budget profile"),
        (lambda v: {"budgets": v["budgets"]}, "model: Field required"),
        (_with(model=""), "model: .*at least 1 character"),
        (lambda v: {"model": "m"}, "budgets: Field required"),
        (_with(budgets=[]), "budgets: .*at least 1 item"),
        (_with(budgets=[[], []]), "p.json': budgets, layer 0: no KV head"),
        (_with(budgets=[[True, 2, 3], [1, 2, 3]]), r"budgets.0.0: .*number"),
        (_with(budgets=[["1", 2, 3], [1, 2, 3]]), r"budgets.0.0: .*number"),
        (_with(budgets=[[1, 2, 3], [1, 2]]), "budgets, layer 1: 2 KV heads, but layer 0 of budgets has 3"),
        (_with(budgets=[[1, 2, -3], [1, 2, 3]]), r"budgets.0.2: .*greater than or equal to 0"),
        (_with(budgets=[[1, 2, float("nan")], [1, 2, 3]]), r"budgets.0.2: .*finite"),
        (_with(budgets=[[1, 2, float("inf")], [1, 2, 3]]), r"budgets.0.2: .*finite"),
        (_with(budgets=[[1, 2, "many"], [1, 2, 3]]), r"budgets.0.2: .*number"),
        (_with(budgets=[1, 2, 3]), r"budgets.0: .*tuple"),
        (_with(prompts=[[[1, 2, 3]]], lengths=None), "prompt 0 has 1 layers, budgets 2"),
        (_with(prompts=[[[1, 2, 3], [1, 2]]], lengths=None), "prompt 0, layer 1: 2 KV heads"),
        (_with(lengths=[9]), "1 lengths of 2 prompts"),
        (_with(lengths=[9, 0]), r"lengths.1: .*greater than or equal to 1"),
        (_with(lengths=[7, 10]), "prompt 0, layer 0, KV head 0: 8 is above the length of 7"),
        (_with(prompts=None, lengths=[5, 7]), "budgets, layer 0, KV head 0: 8 is above the length of 7"),
        (_with(surprise=1), "surprise: Extra inputs are not permitted"),
        (_with(version=2), "version: Input should be 1"),
    ],
)
def test_broken_profiles_are_refused_by_name(
    write_json: Callable[[str, Any], Path], change: Callable[[Any], Any], message: str
) -> None:
    path = write_json("p.json", change(whole()))
    with pytest.raises(ValueError, match=message) as caught:
        load_budgets(path, setting="--profile")
    assert f"--profile = '{path}'" in str(caught.value)


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_budgets(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"model": "m", "bud')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("cut", "deep"):
        with pytest.raises(ValueError, match="is not valid JSON"):
            load_budgets(tmp_path / f"{name}.json")


def test_another_model() -> None:
    profile = BudgetProfile(**whole())
    for name in ("org/Model-1B", "/data/models/Model-1B/", "model-1b"):
        profile.check_model(name, 2, 3)
    with pytest.raises(ValueError, match="is the profile of 'org/Model-1B', not of 'org/Model-2B'"):
        profile.check_model("org/Model-2B", 2, 3)
    with pytest.raises(ValueError, match="2 layers of 3 KV heads; 'org/Model-1B' has 2 layers of 8"):
        profile.check_model("org/Model-1B", 2, 8)
    with pytest.raises(ValueError, match="has 4 layers of 3"):
        profile.check_model("org/Model-1B", 4, 3)


def test_budgets_above_the_length() -> None:
    profile = BudgetProfile(**whole())
    profile.check_length(8)
    with pytest.raises(ValueError, match="budgets, layer 0, KV head 0: 8 is above the length of 7"):
        profile.check_length(7)
