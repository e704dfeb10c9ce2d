"""Plans of compressed caches whose heads keep what a profile says: times of a token, memory, mappings, refusals."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from docs.generated import ROOT
from megakv.cache.layer import contiguous_layer
from megakv.costmodel.head_times import HeadTimes
from megakv.costmodel.presets import Hardware, hardware
from megakv.costmodel.shape import LayerShape, ModelShape
from megakv.engine.config import load_config
from megakv.fairkv.mapping import load_mapping
from megakv.fairkv.profile import BudgetProfile
from megakv.fairkv.step_time import contiguous_seconds
from megakv.launcher.command import main
from megakv.planner.choices import Demand
from megakv.planner.cluster import ClusterPlanner
from megakv.planner.planned_heads import fullest_share

RDMA = hardware("h100-rdma")
LAYERS, HEADS = 3, 8
MODEL = ModelShape(
    1024, 4096, 32000, 16, HEADS, 64, 64, (LayerShape(12 * 1024**2),) * LAYERS, 32000 * 1024, torch.bfloat16
)
SERVED = {"context": 1000, "cached": 200_000, "gpus": 16, "batch": 32, "lossy": True, "objective": "throughput"}


def profile_of(budgets: Any) -> BudgetProfile:
    return BudgetProfile(model="somewhere/some", budgets=tuple(map(tuple, np.array(budgets, dtype=float).tolist())))


def uneven() -> BudgetProfile:
    return profile_of([[random.paretovariate(1.2) for _ in range(HEADS)] for _ in range(LAYERS)])


def tight() -> Hardware:
    """A machine on which such caches have no room."""
    return replace(RDMA, spec=RDMA.spec.model_copy(update={"memory_bytes": int(13e9)}))


def test_tokens_take_what_the_heads_take_where_they_are() -> None:
    budgets, demand = uneven(), Demand(**SERVED)
    planner = ClusterPlanner(tight(), MODEL, budgets=budgets)
    choices = planner.plan(demand).choices
    compressed = [
        each for each in choices if each.fit.kept_share < 1 and each.mesh.cp_size == 1 and not each.fit.offload
    ]
    assert any(each.mapping is not None for each in compressed) and len(compressed) > 1
    for choice in compressed:
        size = choice.mesh.tp_size
        kept = budgets.scaled(round(choice.fit.kept_share * demand.total), demand.total).budgets
        times = HeadTimes(RDMA.on_mesh(cp_size=1, tp_size=size), MODEL, tp_size=size, batch=demand.batch)
        contiguous, layers = contiguous_seconds(times, kept), choice.mapping and choice.mapping.layers
        assert choice.ttit_s == pytest.approx(times.step_seconds(layers, kept) if layers else contiguous)
        assert choice.memory.total <= planner.room and (choice.mapping_gain is None) == (not 1 < size <= HEADS)
        if choice.mapping is not None:
            assert choice.mapping_gain == pytest.approx(contiguous / choice.ttit_s) and choice.mapping_gain > 1
            assert choice.heads == f"mapped, {choice.mapping_gain:.3f} x as fast"
    assert all(each.mapping_gain is None for each in choices if each not in compressed)


def test_equal_heads_are_left_alone() -> None:
    found = ClusterPlanner(tight(), MODEL, budgets=profile_of(np.full((LAYERS, HEADS), 7))).plan(Demand(**SERVED))
    looked = [each for each in found.choices if each.mapping_gain is not None]
    assert looked and all(each.mapping is None and each.heads == "contiguous" for each in looked)


def test_ranks_have_room_for_the_fullest_ones_heads() -> None:
    budgets = uneven()
    for size in (1, 2, 4, 8, 16):
        loads = np.zeros(size)
        for row in budgets.budgets if size <= HEADS else ():
            loads += contiguous_layer(HEADS, size).loads(row, size)
        whole = np.sum(budgets.budgets, axis=0)
        expected = loads.max() / loads.mean() if size <= HEADS else whole.max() / whole.mean()
        assert fullest_share(budgets, size) == pytest.approx(expected)
    # A copy of a head is not made where its weights leave no room.
    planner = ClusterPlanner(tight(), MODEL, budgets=budgets)
    choices = planner.plan(Demand(**SERVED)).choices
    mapped = next(each for each in choices if each.mapping is not None)
    assert planner._placed(Demand(**SERVED), mapped, planner._profile(mapped.mesh)).mapping == mapped.mapping
    full = replace(mapped, mapping=None, memory=replace(mapped.memory, working=mapped.memory.working + (1 << 50)))
    crowded = planner._placed(Demand(**SERVED), full, planner._profile(mapped.mesh))
    assert crowded.mapping is None and crowded.heads == "contiguous" and crowded.ttit_s > mapped.ttit_s


def test_scaled_budgets_have_the_mean_and_none_is_above_the_prompt() -> None:
    for _ in range(20):
        weights = np.random.default_rng(random.randrange(1 << 30)).pareto(1.0, (LAYERS, HEADS))
        most = random.randint(100, 10_000)
        mean = random.randint(1, most)
        found = np.array(profile_of(weights).scaled(mean, most).budgets)
        assert found.sum() == mean * weights.size and found.max() <= most
        free = found < most
        # Those that are not full are in proportion, to whole tokens.
        rate = found[free].sum() / weights[free].sum() if free.any() else 0.0
        assert np.abs(found - rate * weights)[free].max(initial=0) <= 1 + 1e-6
    assert set(np.ravel(profile_of(np.zeros((2, 4))).scaled(50, 100).budgets)) == {50}


MACHINE, CONTEXT = (
    {"memory_bytes": int(40e9)},
    ["--context", "1000", "--cached", "60000", "--batch", "48", "--gpus", "2"],
)


def planned(folder: Path, *more: str, **values: Any) -> list[str]:
    """A command, for a profile of Llama 3 8B with some values of its own, on a machine with little memory."""
    budgets = [[random.uniform(1, 10) for _ in range(8)] for _ in range(32)]
    (folder / "budgets.json").write_text(json.dumps({"model": "x/llama3_8b", "budgets": budgets} | values))
    spec = RDMA.spec.model_copy(update=MACHINE).model_dump(mode="json")
    (folder / "machine.json").write_text(json.dumps(spec))
    start = [
        "plan",
        "--model",
        str(ROOT / "recipes" / "llama3_8b"),
        *CONTEXT,
        "--hardware",
        str(folder / "machine.json"),
    ]
    return [*start, "--objective", "throughput", *more]


def budgeted(folder: Path) -> tuple[str, ...]:
    return "--allow-lossy", "--budgets", str(folder / "budgets.json"), "--mapping", str(folder / "mapping.json")


def test_the_command_writes_the_mapping_of_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: str(tmp_path / f"{name}.json") for name in ("config", "plan", "mapping")}
    written = [*budgeted(tmp_path), "--config", files["config"], "--json", files["plan"]]
    # In each layer contiguous heads leave most of the work to one rank; over all layers ranks keep the same.
    uneven_layers = [[10.0] * 4 + [1.0] * 4, [1.0] * 4 + [10.0] * 4] * 16
    assert main(planned(tmp_path, *written, budgets=uneven_layers)) == 0
    shown, values = capsys.readouterr().out, json.loads(Path(files["plan"]).read_text())
    best, fairkv = values["best"], load_config(files["config"]).megakv.fairkv
    assert best["mapping"] is True and best["mesh"]["tp_size"] == 2 and best["mapping_gain"] > 1
    mapping = load_mapping(fairkv.mapping or "")
    assert fairkv.mapping == files["mapping"] and mapping.time is not None and mapping.tp_size == 2
    assert mapping.time.seconds == pytest.approx(best["ttit_s"]) and mapping.time.gain == best["mapping_gain"]
    assert fairkv.budget == best["fit"]["kept_share"] < 1 and f"{best['mapping_gain']:.3f} x as fast" in shown
    # Heads that keep the same stay where they are.
    Path(files["mapping"]).unlink()
    even = planned(tmp_path, *budgeted(tmp_path), "--config", files["config"], budgets=[[1.0] * 8] * 32)
    assert main(even) == 0 and "leave them alone" in capsys.readouterr().out
    assert load_config(files["config"]).megakv.fairkv.mapping is None and not Path(files["mapping"]).exists()


@pytest.mark.parametrize(
    ("values", "more", "message"),
    [
        ({"budgets": [[1.0] * 8] * 31}, None, "with 31 layers of 8 KV heads; "),
        ({"budgets": [[1.0] * 4] * 32}, None, "with 32 layers of 4 KV heads; "),
        ({"model": "x/llama3_70b"}, None, "is the profile of 'x/llama3_70b', not of "),
        ({"budgets": [[float("nan")] * 8] * 32}, None, "--budgets"),
        ({"method": "headkv"}, None, "is of method 'headkv', but a plan compresses by 'ada_snapkv'"),
        ({}, ["--mapping", "{}/mapping.json"], "--mapping without --budgets"),
        ({}, ["--budgets", "{}/budgets.json", "--allow-lossy"], "--budgets without --mapping"),
        ({}, ["--budgets", "{}/budgets.json", "--mapping", "{}/m.json"], "only with --allow-lossy"),
        ({}, ["--budgets", "{}/no.json", "--mapping", "{}/m.json", "--allow-lossy"], "--budgets"),
        ({}, ["--budgets", "{}/budgets.json", "--mapping", "{}/no/m.json", "--allow-lossy"], "cannot be written"),
        (
            {},
            ["--budgets", "{}/budgets.json", "--mapping", "{}/budgets.json", "--allow-lossy"],
            "is the file of --budgets",
        ),
    ],
)
def test_what_cannot_be_planned_with_budgets(
    values: dict[str, Any],
    more: list[str] | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ClusterPlanner, "plan", None)
    given = budgeted(tmp_path) if more is None else [each.format(tmp_path) for each in more]
    assert main(planned(tmp_path, *given, **values)) == 1
    assert message in capsys.readouterr().err
