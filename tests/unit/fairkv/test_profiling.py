"""From reports of ranks to a profile, and what `megakv fairkv profile` refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakv.base.loads import barrier_utilisation
from megakv.fairkv.figures import draw_profile
from megakv.fairkv.profile import MeasuredPrompt, busy_rate, cosine_similarity, kept_tokens, load_budgets, make_profile
from megakv.launcher.budget_ranks import print_tables
from megakv.launcher.command import main
from megakv.tracking.report import RankReport, RunReport
from megakv.weights.placement import contiguous_head_map
from tests.unit.fairkv.instances import RANDOM


def report(kept: np.ndarray, cp: int, tp: int, n_heads: int) -> RunReport:
    """Of ranks that together hold ``[layers, K]`` tokens, every token on one context-parallel rank."""
    layers, heads = kept.shape
    head_map = contiguous_head_map(layers, n_heads, heads, tp)
    parts = RANDOM.multinomial(1000, [1 / cp] * cp, kept.shape)
    parts = parts * kept[..., None] // 1000
    parts[..., 0] += kept - parts.sum(-1)
    ranks = []
    for rank in range(cp * tp):
        held = [
            [int(parts[layer, head, rank // tp]) for head in head_map.shard(layer, rank % tp).kv_heads]
            for layer in range(layers)
        ]
        ranks.append(RankReport(rank, "host", rank // tp, rank % tp, 1, 1, 1, head_tokens=held))
    return RunReport(model="m", mesh={"cp": cp, "tp": tp}, prompt_tokens=9, new_tokens=1, ttft_s=1.0, ttit_s=None,
                     config={}, ranks=ranks, versions={}, machine={})  # fmt: skip


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (3, 1), (2, 3), (1, 6), (2, 12)])
def test_heads_of_all_ranks_are_put_together(cp: int, tp: int) -> None:
    """Context-parallel ranks add up, also with heads that are copied because there are more ranks."""
    kept = RANDOM.integers(0, 99, (2, 6))
    heads = contiguous_head_map(2, 12, 6, tp)
    assert (kept_tokens(report(kept, cp, tp, 12), heads) == kept).all()


def test_tables_of_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = {"a": 2, "b": 1, "c": 3}
    prompts = [
        MeasuredPrompt(name, 2000, RANDOM.integers(1, 900, (3, 8)).astype(float))
        for name, count in sets.items()
        for _ in range(count)
    ]
    RANDOM.shuffle(prompts)
    profile = make_profile("org/m", "ada_snapkv", prompts)
    everything = np.array([prompt.budgets for prompt in prompts])
    np.testing.assert_allclose(profile.budgets, everything.mean(0))
    assert profile.lengths == (2000,) * 6 and profile.data_sets is not None and profile.prompts is not None
    assert {each.name: each.prompts for each in profile.data_sets} == sets
    means = {name: np.mean([p.budgets for p in prompts if p.data_set == name], axis=0).ravel() for name in sets}
    first = 0
    for each in profile.data_sets:
        own = np.array(profile.prompts[first : first + each.prompts])
        first += each.prompts
        np.testing.assert_allclose(own.mean(0).ravel(), means[each.name])
        others = np.mean([mean for name, mean in means.items() if name != each.name], axis=0)
        cosine = means[each.name] @ others / np.sqrt((means[each.name] @ means[each.name]) * (others @ others))
        assert each.similarity == pytest.approx(cosine)
        for size in (2, 4, 8):
            loads = own.reshape(len(own), 3, size, -1).sum(-1)
            assert each.busy_rates[size] == pytest.approx(np.mean([barrier_utilisation(load) for load in loads]))
    assert profile.busy_rates == pytest.approx({size: busy_rate(list(everything), size) for size in (2, 4, 8)})
    profile.save(tmp_path / "p.json")
    assert load_budgets(tmp_path / "p.json") == profile
    draw_profile(profile, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    print_tables(profile)
    shown = capsys.readouterr().out
    assert "TP = 2  TP = 4  TP = 8" in shown and f"{100 * profile.busy_rates[8]:.1f}" in shown  # type: ignore[index]


def test_one_data_set_and_one_head(capsys: pytest.CaptureFixture[str]) -> None:
    profile = make_profile("m", "headkv", [MeasuredPrompt("a", 9, np.array([[3.0], [4.0]]))])
    assert profile.data_sets is not None and profile.data_sets[0].similarity is None and profile.busy_rates == {}
    print_tables(profile)
    shown = capsys.readouterr().out
    assert "nothing to compare it with" in shown and "one KV head" in shown
    assert cosine_similarity(np.zeros((2, 2)), np.ones((2, 2))) == 1.0


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "one two"}\n\n"three"\n')
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": None}, "--budget is missing"),
        ({"budget": "0.5", "method": "snapkv"}, None),
        ({"budget": "-1"}, "megakv.fairkv.budget = -1.0"),
        ({"budget": "12.5"}, "allowed: a fraction such as 0.25, or a whole number of tokens"),
        (
            {"config": {"megakv": {"fairkv": {"method": "pyramidkv", "budget": 90}}}},
            "'pyramidkv' keeps the same number",
        ),
        ({"config": {"megakv": {"offload": {"enabled": True}}}}, "megakv.offload.enabled = true is not supported"),
        ({"config": {"tensor_parallel": {"tp_size": 2}}, "ranks": "3"}, "--ranks 3: allowed: multiples of"),
        ({"prompts": "no-such.txt"}, "--prompts no-such.txt cannot be read"),
        ({"prompts": "{tmp}/empty"}, "holds no prompt"),
        ({"field": "text"}, "set.jsonl line 1 has no 'text' among ['prompt']: --field"),
        ({"lines": '{"prompt": 3}'}, "set.jsonl line 1: the prompt must be text, not 3"),
        ({"lines": '"a"\n{"prompt": '}, "set.jsonl line 2 is not valid JSON"),
        ({"lines": "\n"}, "is empty"),
        ({"prompts": ["{tmp}/set.jsonl", "{tmp}/empty/../set.jsonl"]}, "two data sets of the name 'set'"),
        ({"threads": "0"}, "--threads 0: allowed: 1 or more"),
        ({"json": "{tmp}/none/out.json"}, "cannot be written"),
        ({"json": "{tmp}/out.png"}, "is where the picture would go"),
    ],
)
def test_what_is_refused_before_ranks_start(
    tmp_path: Path,
    prompts: Path,
    write_json: Callable[[str, Any], Path],
    capsys: pytest.CaptureFixture[str],
    arguments: dict[str, Any],
    message: str | None,
) -> None:
    (tmp_path / "empty").mkdir()
    values = {"model": "m", "prompts": str(prompts), "budget": "0.25", "json": "{tmp}/out.json"} | arguments
    if lines := values.pop("lines", None):
        prompts.write_text(lines)
    if config := values.pop("config", None):
        values["config"] = str(write_json("config.json", config))
    words = ["fairkv", "profile"]
    for name, value in values.items():
        if value is not None:
            given = value if isinstance(value, list) else [value]
            words += [f"--{name}", *(each.replace("{tmp}", str(tmp_path)) for each in given)]
    if message is None:
        with pytest.raises(SystemExit):
            main(words)
        assert "invalid choice: 'snapkv'" in capsys.readouterr().err
    else:
        assert main(words) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_data_sets_without_their_prompts(tmp_path: Path) -> None:
    values = {"model": "m", "budgets": [[1, 2]], "data_sets": [{"name": "a", "prompts": 2, "busy_rates": {"2": 0.5}}]}
    (tmp_path / "p.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="data_sets have 2 prompts, prompts 0"):
        load_budgets(tmp_path / "p.json")
