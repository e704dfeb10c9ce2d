"""``megakv fairkv place`` refuses what cannot work before it starts anything, and says what a mapping is worth."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakv.cache.layer import contiguous_layer
from megakv.fairkv.mapper import map_heads
from megakv.fairkv.profile import BudgetProfile, ModelIdentity
from megakv.launcher.command import main
from megakv.launcher.commands.fairkv_map import step_times
from megakv.launcher.gain import Gain
from tests.families import llama

LAYERS, HEADS, KV_HEADS = 3, 9, 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """As the heads of SmolLM2: three of them are nobody's power of two."""
    config = llama(
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=36,
        max_position_embeddings=512,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def budgets(value: Any = 20.0, layers: int = LAYERS, heads: int = KV_HEADS) -> list[list[Any]]:
    found: list[list[Any]] = [[10.0] * heads for _ in range(layers)]
    found[-1][-1] = value
    return found


def foreign_identity(model: Path) -> dict[str, Any]:
    sizes = {"vocab_size": 7, "model_type": "llama"}
    return ModelIdentity(sizes=sizes, embeddings=(0.0,)).model_dump()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "2"], "tp_size = 2 cannot split 9 query heads over 3 KV heads; sizes that can: 1, 3, 9"),
        ([], "waits for nobody; sizes that split 9 query heads over 3 KV heads: 3, 9"),
        (["--tp", "3", "--prompts", "none.txt"], "--prompts none.txt cannot be read: No such file"),
        (["--tp", "3", "--prompts", "{tmp}/empty.txt"], "empty.txt is empty"),
        (["--tp", "3", "--prompts", "{tmp}/empty.jsonl"], "empty.jsonl is empty"),
        (["--tp", "3", "--prompts", "{tmp}/none"], "--prompts {tmp}/none holds no prompt"),
        (["--tp", "3", "--config", "{tmp}/even.json"], "method = 'snapkv' keeps the same number of tokens"),
        (["--tp", "3", "--config", "{tmp}/offload.json"], "megakv.offload.enabled = true is not supported"),
        (["--tp", "9", "--config", "{tmp}/three.json"], "--tp 9 contradicts tensor_parallel.tp_size = 3"),
        (["--tp", "3", "--budget", "0"], "megakv.fairkv.budget = 0.0"),
        (["--tp", "3", "--copies", "7"], "copies = 7: each of 3 KV heads can be on each of tp = 3 ranks once"),
        (["--tp", "3", "--copies", "-1"], "copies = -1: allowed: 0 or more"),
        (["--tp", "9", "--copies", "0"], "ranks without a head; 6 copies are needed, or fewer ranks"),
        (["--tp", "3", "--repeats", "0"], "--repeats 0: allowed: 1 or more"),
        (["--tp", "3", "--max-new-tokens", "1"], "--max-new-tokens 1: allowed: 2 or more"),
        (["--tp", "3", "--threads", "0"], "--threads 0: allowed: 1 or more"),
        (["--tp", "3", "--out", "/proc/none"], "--out /proc/none/result.json: cannot be written"),
        (["--tp", "3", "--out", "{tmp}/empty.txt"], "empty.txt/result.json: cannot be written"),
        (["--tp", "3", "--json", "/proc/none/x.json"], "--json /proc/none/x.json: cannot be written"),
        (["--tp", "3", "--hardware", "h100-rmda"], "'h100-rmda' is neither a file nor a known machine"),
        (["--tp", "3", "--cp", "2", "--hardware", "h100-rdma"], "steps of tensor-parallel ranks alone, but --cp is 2"),
        (["--tp", "3", "--dtype", "fp32", "--hardware", "h100-rdma"], "bfloat16, but this run (--dtype) is in float32"),
        (["--tp", "3", "--wandb", "a/b"], "--wandb a/b: allowed: 1 to 128 characters"),
    ],
)  # fmt: skip
def test_refusals(words: list[str], message: str, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tmp = model.parent
    (tmp / "none").mkdir()
    for name, text in {
        "prompt.txt": "aa bb", "empty.txt": " \n", "empty.jsonl": "\n",
        "even.json": json.dumps({"megakv": {"fairkv": {"method": "snapkv", "budget": 0.5}}}),
        "offload.json": json.dumps({"megakv": {"offload": {"enabled": True}}}),
        "three.json": json.dumps({"tensor_parallel": {"tp_size": 3}}),
    }.items():  # fmt: skip
        (tmp / name).write_text(text)
    words = [word.replace("{tmp}", str(tmp)) for word in words]
    prompts = [] if "--prompts" in words else ["--prompts", str(tmp / "prompt.txt")]
    out = [] if "--out" in words else ["--out", str(tmp / "out")]
    refused([str(model), *prompts, *out, *words], message.replace("{tmp}", str(tmp)), capfd)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"budgets": budgets(layers=4)},
            "with 4 layers of 3 KV heads; '{model}' has 3 layers of 3; measure a profile of",
        ),
        ({"budgets": budgets(heads=4)}, "with 3 layers of 4 KV heads"),
        ({"model": "other", "budgets": budgets()}, "is the profile of 'other', not of '{model}'"),
        ({"budgets": budgets(), "identity": True}, "is the profile of another model, 'model': vocab_size 7, but this"),
        ({"budgets": budgets(float("nan"))}, "budgets.2.2: Input should be a finite number"),
        ({"budgets": budgets(-1.0)}, "budgets.2.2: Input should be greater than or equal to 0"),
        ({"budgets": budgets("12")}, "budgets.2.2: Input should be a valid number"),
        ({"budgets": budgets(513.0)}, "budgets, layer 2, KV head 2: 513 is above the length of 512"),
        ({"budgets": [[10.0, 10.0, 10.0], [10.0], [10.0] * 3]}, "budgets, layer 1: 1 KV heads, but layer 0"),
        ({"budgets": []}, "budgets: Tuple should have at least 1 item"),
        ({"budgets": [[], [], []]}, "budgets, layer 0: no KV head"),
        ("", "is not valid JSON"),
        ("{}", "budgets"),
        ("[1]", "is not a megakv budget profile"),
        (None, "cannot be read: No such file"),
    ],
)
def test_refused_profiles(values: Any, message: str, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (model.parent / "prompt.txt").write_text("aa bb")
    path = model.parent / "given.json"
    if isinstance(values, dict):
        if values.get("identity"):
            values = values | {"identity": foreign_identity(model)}
        path.write_text(json.dumps({"model": "model"} | values))
    elif values is not None:
        path.write_text(values)
    words = ["--prompts", str(model.parent / "prompt.txt"), "--tp", "3", "--budgets", str(path)]
    said = refused([str(model), *words, "--out", str(model.parent / "out")], message.format(model=model), capfd)
    assert f"--budgets = {str(path)!r}" in said


def refused(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> str:
    assert main(["fairkv", "place", *words]) == 1
    said = capfd.readouterr()
    assert "ranks on" not in said.out
    assert message in said.err and said.err.startswith("megakv: error: "), said.err
    return said.err


def test_what_a_mapping_is_worth() -> None:
    rng = np.random.default_rng()
    rows = rng.lognormal(5, 0.8, (LAYERS, 8))
    mapping = map_heads(BudgetProfile(model="m", budgets=rows.tolist()), tp_size=4, copies=3)
    gain = Gain.predict(mapping)
    # With three copies all four ranks have a quarter; neighbours have pairs.
    assert gain.predicted == pytest.approx(rows.reshape(LAYERS, 4, 2).sum(2).max(1).sum() / (rows.sum() / 4))
    assert not gain.declined and not gain.taken and "measured" not in gain.sentence()
    faster, slower = gain.measure(1.2, None), gain.measure(0.9, None)
    assert faster.taken and faster.sentence().startswith("measured 1.20 times as fast in a whole step; predicted ")
    assert not slower.taken and slower.sentence().startswith("leave the heads alone: measured 0.90 times as fast")
    # Where ranks take turns, a faster step is no reason.
    shared = gain.measure(1.2, (4, 2))
    assert not shared.taken and shared.sentence().startswith("not known here (--hardware predicts steps): predicted ")
    assert shared.sentence().endswith("which means nothing where 4 threads of ranks share 2 cores")
    assert shared.values()["shared_cores"] == {"threads": 4, "cores": 2}
    # But the cost model's word is.
    assert replace(shared, step=1.1).taken
    assert not replace(slower, step=1.1).taken
    costly = replace(gain, step=1.0)
    assert costly.declined and costly.sentence().endswith("is predicted to have faster steps than heads in runs")


def test_the_cost_model_says_what_a_step_gains(tmp_path: Path) -> None:
    llama(num_hidden_layers=LAYERS, num_attention_heads=16, num_key_value_heads=8).save_pretrained(tmp_path)
    rows = np.random.default_rng().lognormal(0, 0.8, (LAYERS, 8))
    times = step_times("h100-rdma", str(tmp_path), tp_size=4)
    profile = BudgetProfile(model="m", budgets=(1e6 * rows).tolist())
    mapping = map_heads(profile, tp_size=4, copies=3, times=times)
    plain = times.step_seconds([contiguous_layer(8, 4)] * LAYERS, profile.budgets)
    # So many tokens are all that counts.
    step = Gain.predict(mapping).step
    assert step == pytest.approx(plain / times.step_seconds(mapping.layers, profile.budgets)) and step > 1


@pytest.mark.parametrize("rows", [[[5.0, 5.0]], [[0.0, 0.0]], [[9.0, 1.0], [2.0, 3.0]]])
def test_what_no_mapping_can_gain(rows: list[list[float]]) -> None:
    gain = Gain.predict(map_heads(BudgetProfile(model="m", budgets=rows), tp_size=2))
    assert gain.declined and not gain.taken
    assert gain.sentence().startswith("leave the heads alone: with no copies (--copies allows some)")
