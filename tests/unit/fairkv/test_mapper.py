"""The mapper from a profile to a file, its command and its picture."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakv.cache.layer import LayerMapping, contiguous_layer
from megakv.cache.splitting import slowest_loads
from megakv.fairkv.copy_limits import CopyLimits
from megakv.fairkv.mapper import balance, map_heads
from megakv.fairkv.mapping import HeadMapping, by_rank, load_mapping
from megakv.fairkv.profile import BudgetProfile
from megakv.launcher.command import main
from tests.families import llama
from tests.unit.fairkv.instances import RANDOM, skewed
from tests.unit.fairkv.oracles import best_layer


def profile_of(rows: list[list[float]], **fields: Any) -> BudgetProfile:
    return BudgetProfile(model="org/model", budgets=rows, **fields)


def requests_like(rows: list[list[float]], count: int, sigma: float = 0.35) -> np.ndarray:
    """[requests, layers, heads] around a profile, equally much in each layer as AdaKV keeps."""
    found = np.array(rows) * np.exp(sigma * RANDOM.standard_normal((count, len(rows), len(rows[0]))))
    return found / found.sum(axis=2, keepdims=True) * 8000


def test_best_assignment_of_a_model() -> None:
    rows = skewed(5, 6)
    found = map_heads(profile_of(rows), tp_size=3)
    slowest = [best_layer(row, CopyLimits(3))[0] for row in rows]
    mean = [sum(row) / 3 for row in rows]
    assert found.barrier_utilisation == pytest.approx(np.mean(np.array(mean) / slowest), rel=0.01)
    assert sum(mean) <= found.bound <= sum(slowest) * (1 + 1e-6)
    assert np.sum(found.loads, axis=0) == pytest.approx(found.rank_loads)
    for row, loads, ranks in zip(rows, found.loads, found.mapping, strict=True):
        assert sorted(replica.kv_head for rank in ranks for replica in rank) == list(range(6))
        assert [sum(row[replica.kv_head] for replica in rank) for rank in ranks] == pytest.approx(loads)
    assert found.contiguous is not None and found.contiguous.barrier_utilisation <= found.barrier_utilisation + 1e-9


@pytest.mark.drawn(8)
@pytest.mark.parametrize("split", ["free", "even"])
@pytest.mark.parametrize("objective", ["barrier", "equation4"])
@pytest.mark.parametrize(("size", "copies"), [(4, 0), (4, 2), (8, 4), (3, 5), (1, 0)])
def test_every_kind(split: Any, objective: Any, size: int, copies: int) -> None:
    rows = skewed(4, 8)
    found = map_heads(profile_of(rows), tp_size=size, copies=copies, split=split, objective=objective)
    assert 0 < found.barrier_utilisation <= 1 and found.barrier_utilisation <= 1
    assert all(layer.copies <= copies for layer in found.layers)
    assert sum(found.rank_loads) == pytest.approx(sum(map(sum, rows)))
    if objective == "equation4":
        barrier = map_heads(profile_of(rows), tp_size=size, copies=copies, split=split)
        assert max(found.rank_loads) <= max(barrier.rank_loads) * (1 + 1e-6)
        assert barrier.barrier_utilisation >= found.barrier_utilisation - 1e-6
        assert found.bound <= max(found.rank_loads) * (1 + 1e-6)


def test_the_criterion_of_algorithm_2() -> None:
    rows = skewed(4, 6)
    found, barrier = (
        map_heads(profile_of(rows), tp_size=4, copies=2, split="even", objective=objective)
        for objective in ("algorithm2", "barrier")
    )
    apart, other = (np.ptp(np.array(each.loads), axis=1) for each in (found, barrier))
    assert (apart <= other + 1e-6).all() and found.bound <= apart.sum() + 1e-6
    assert found.barrier_utilisation <= barrier.barrier_utilisation + 1e-9
    # Without copies there is nothing to share, in any way.
    assert map_heads(profile_of(rows), tp_size=4, objective="algorithm2").objective == "algorithm2"


def test_anything_that_is_possible_keeps_its_limits() -> None:
    """Odd sizes, empty layers, budgets far apart, and every setting that may go with them."""
    for _ in range(15):
        layers, heads, size = (
            int(RANDOM.choice(values)) for values in ((1, 2, 3), (1, 2, 3, 5, 8, 12), (1, 2, 3, 5, 8))
        )
        copies = int(RANDOM.integers(0, min(heads * (size - 1), size + 4) + 1))
        rows = np.exp(RANDOM.choice([0.1, 0.8, 3]) * RANDOM.standard_normal((layers, heads))) * 100
        rows[RANDOM.random(rows.shape) < 0.1] = 0
        rows[RANDOM.integers(layers)] *= RANDOM.integers(2)
        settings: dict[str, Any] = {"split": str(RANDOM.choice(["even", "free"]))}
        settings["objective"] = str(RANDOM.choice(["barrier", "equation4"]))
        for name, value in (
            ("max_replicas", int(RANDOM.integers(1, size + 1))),
            ("copied_heads", int(RANDOM.integers(0, heads + 1))),
            ("memory_cap", float(rows.sum() / size * RANDOM.uniform(1, 1.5)) + 1),
        ):
            if RANDOM.random() < 0.3:
                settings[name] = value
        try:
            found = map_heads(profile_of(rows.tolist()), tp_size=size, copies=copies, **settings)
        except ValueError as error:
            assert "leave ranks without a head" in str(error) or "memory_cap = " in str(error), (rows, size, settings)
            continue
        for layer in found.layers:
            assert layer.copies <= copies
            assert max(layer.replicas) <= settings.get("max_replicas", size)
            assert sum(n > 1 for n in layer.replicas) <= settings.get("copied_heads", heads)
        assert sum(found.rank_loads) == pytest.approx(rows.sum())
        assert max(found.rank_loads) <= settings.get("memory_cap", float("inf")) * (1 + 1e-6)
        assert found.contiguous is not None
        if settings["objective"] == "barrier" and "memory_cap" not in settings:
            slowest = sum(map(max, found.loads))
            assert found.bound <= slowest * (1 + 1e-6)
            if heads >= size:
                assert slowest <= sum(map(max, found.contiguous.loads)) * (1 + 1e-6)


def test_a_solver_rounds_below_zero() -> None:
    """HiGHS returned parts of -1e-11, which no mapping may have."""
    layer = LayerMapping.even([[0, 1, 2], [0, 2]]).with_shares([[-1e-11, 1.0, 1e-12], [-1e-9, -0.0]])
    assert layer.shares[1] == (0.5, 0.5) and sum(layer.shares[0]) == pytest.approx(1)
    assert all(0 <= replica.share <= 1 for rank in by_rank(layer, 3) for replica in rank)


def test_saved_and_read_back(tmp_path: Path) -> None:
    found = map_heads(profile_of(skewed(3, 8)), tp_size=4, copies=3)
    found.save(tmp_path / "map.json")
    assert load_mapping(tmp_path / "map.json") == found
    again = map_heads(profile_of([list(row) for row in skewed(3, 8)]), tp_size=4, copies=3)
    assert again.digest() != found.digest()


def test_the_same_profile_gives_the_same_mapping() -> None:
    rows = skewed(4, 8)
    assert map_heads(profile_of(rows), tp_size=4, copies=6) == map_heads(profile_of(rows), tp_size=4, copies=6)


def test_placement_of_weights() -> None:
    """Every query head beside its KV head, on every rank that has a replica of it."""
    found = map_heads(profile_of([[9.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]), tp_size=2, copies=1)
    heads = found.head_map(16)
    assert heads.tp_size == 2 and len(heads.layers) == 2
    assert heads.whole_copies(0) == {0: (0, 1, 2, 3)}
    for layer, ranks in enumerate(found.mapping):
        for rank, replicas in enumerate(ranks):
            shard = heads.shard(layer, rank)
            assert sorted(shard.kv_heads) == [replica.kv_head for replica in replicas]
            assert shard.query_heads == tuple(4 * head + index for head in shard.kv_heads for index in range(4))


def by_request(found: HeadMapping, requests: np.ndarray) -> float:
    """Balance of the ranks where each request splits its own tokens: 1 where none waits."""
    values = [
        requests[:, layer].sum(axis=1) / found.tp_size / slowest_loads(mapping.ranks, requests[:, layer], found.tp_size)
        for layer, mapping in enumerate(found.layers)
    ]
    return float(np.mean(values))


@pytest.mark.usefixtures("same_budgets")
def test_held_out_requests() -> None:
    """Mapped for half of the prompts: never below contiguous on the others, and balanced by their own splits."""
    rows = skewed(6, 8)
    prompts, others = requests_like(rows, 12), requests_like(rows, 12)
    profile = profile_of(prompts.mean(axis=0).tolist(), prompts=prompts.tolist())
    for size, copies in ((4, 0), (4, 1), (4, 8), (8, 4)):
        plain = [contiguous_layer(8, size)] * 6
        found = map_heads(profile, tp_size=size, copies=copies)
        static = np.mean([balance(found.layers, rows, size).barrier_utilisation for rows in others])
        contiguous = np.mean([balance(plain, rows, size).barrier_utilisation for rows in others])
        assert by_request(found, others) >= static - 1e-9 and static >= contiguous, (size, copies)


@pytest.mark.usefixtures("same_budgets")
def test_held_out_requests_are_balanced() -> None:
    """In the mean over models: where single heads keep most of many layers, eight copies are too few."""
    balances = []
    for _ in range(4):
        rows = skewed(6, 8)
        prompts, others = requests_like(rows, 12), requests_like(rows, 12)
        mean = prompts.mean(axis=0).tolist()
        for profile in (profile_of(mean, prompts=prompts.tolist()), profile_of(mean)):
            balances.append(by_request(map_heads(profile, tp_size=4, copies=8), others))
    assert np.mean(balances[::2]) >= 0.98 and np.mean(balances[1::2]) >= 0.95


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_size": 0}, "tp = 0"),
        ({"copies": 25}, "copies = 25: each of 8 KV heads can be on each of tp = 4 ranks once, which is 24"),
        ({"split": "odd"}, "split = 'odd': allowed: even, free"),
        ({"objective": "speed"}, "objective = 'speed': allowed: time, barrier, equation4, algorithm2"),
        ({"objective": "algorithm2", "copies": 1}, "split = 'free', but Algorithm 2 .* use 'even'"),
        ({"objective": "algorithm2", "memory_cap": 1e6}, "objective = 'algorithm2' knows no memory_cap"),
        ({"memory_cap": 0}, "memory_cap = 0: allowed: tokens per rank, above 0"),
        ({"memory_cap": float("nan")}, "memory_cap = nan"),
        ({"memory_cap": 100}, "memory_cap = 100 tokens on each of 4 ranks is infeasible: .* keep is 200"),
        ({"memory_cap": 100, "objective": "equation4"}, "memory_cap = 100 tokens .* keep is 200"),
    ],
)
def test_impossible_settings(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        map_heads(profile_of([[100.0] * 8]), **{"tp_size": 4, **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v | {"format": "megakv budget profile"}, "is not a megakv head mapping"),
        (lambda v: v | {"tp_size": 3}, "mapping, layer 0: 2 ranks, not 3"),
        (lambda v: v | {"mapping": [[[], v["mapping"][0][1]]]}, r"layer 0, rank 0: KV heads \[\]"),
        (lambda v: v | {"mapping": [[[{"kv_head": 0}], [{"kv_head": 9}]]]}, r"rank 1: KV heads \[9\]; allowed"),
        (lambda v: v | {"mapping": [[[{"kv_head": 0}], [{"kv_head": 1}] * 2]]}, r"rank 1: KV heads \[1, 1\]"),
        (lambda v: v | {"mapping": [[[{"kv_head": 0}], [{"kv_head": 1}]]]}, "shares of KV head 2 sum to 0, not 1"),
        (lambda v: v | {"mapping": [[[{"kv_head": 0, "share": 2}], []]]}, "share: .*less than or equal to 1"),
    ],
)
def test_broken_mappings(write_json: Callable[[str, Any], Path], change: Callable[[dict], dict], message: str) -> None:
    found = map_heads(profile_of([[1.0, 2.0, 3.0]]), tp_size=2)
    path = write_json("map.json", change(json.loads(found.model_dump_json())))
    with pytest.raises(ValueError, match=message) as caught:
        load_mapping(path, setting="fairkv.mapping")
    assert "megakv fairkv map" in str(caught.value)


def test_command(tmp_path: Path, write_json: Callable[[str, Any], Path], capsys: pytest.CaptureFixture[str]) -> None:
    profile = write_json("p.json", {"model": "m", "budgets": skewed(6, 8)})
    out, png = tmp_path / "out.json", tmp_path / "new" / "loads.png"
    command = ["fairkv", "map", "--profile", str(profile), "--tp", "4", "--copies", "3", "--json", str(out)]
    assert main([*command, "--png", str(png)]) == 0
    printed, found = json.loads(capsys.readouterr().out), load_mapping(out)
    assert printed["barrier_utilisation"] == found.barrier_utilisation == pytest.approx(1, abs=1e-6)
    assert printed["contiguous"]["barrier_utilisation"] < 0.9
    assert png.read_bytes().startswith(b"\x89PNG") and len(png.read_bytes()) > 5000
    assert main([*command, "--split", "even", "--max-replicas", "2", "--copied-heads", "2"]) == 0
    assert load_mapping(out).split == "even" and all(
        sum(n > 1 for n in layer.replicas) <= 2 for layer in load_mapping(out).layers
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "4", "--copies", "99"], "copies = 99: each of 8 KV heads"),
        (["--tp", "9"], "tp = 9: 8 KV heads with copies = 0 leave ranks without a head"),
        (["--tp", "4", "--memory-cap", "1"], "memory_cap = 1 tokens on each of 4 ranks is infeasible"),
        (["--tp", "4", "--length", "1"], "layer 0, KV head 0: 100 is above the length of 1"),
        (["--tp", "4", "--length", "-3"], "--length -3: allowed: 1 or more"),
        (["--tp", "4", "--png", "{tmp}/p.json"], "p.json is the file of --profile: name another one"),
        (["--tp", "4", "--json", "{tmp}"], "cannot be written: Is a directory"),
    ],
)
def test_command_refuses(
    tmp_path: Path,
    write_json: Callable[[str, Any], Path],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    profile, out = write_json("p.json", {"model": "m", "budgets": [[100.0] * 8] * 2}), tmp_path / "out.json"
    given = [word.replace("{tmp}", str(tmp_path)) for word in arguments]
    assert main(["fairkv", "map", "--profile", str(profile), "--json", str(out), *given]) == 1
    error = capsys.readouterr().err
    assert error.startswith("megakv: error: ") and message in error
    assert not out.exists()


def test_command_with_another_model(
    tmp_path: Path, write_json: Callable[[str, Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = llama()
    config.save_pretrained(tmp_path / "tiny")
    out = str(tmp_path / "out.json")
    rows = [[10.0] * config.num_key_value_heads] * config.num_hidden_layers
    size = ["--tp", "1", "--model", str(tmp_path / "tiny"), "--json", out]
    good, bad = write_json("a.json", {"model": "x/tiny", "budgets": rows}), {"model": "x/other", "budgets": rows}
    assert main(["fairkv", "map", "--profile", str(good), *size]) == 0
    config_file = ["--tp", "1", "--model", str(tmp_path / "tiny" / "config.json"), "--json", out]
    assert main(["fairkv", "map", "--profile", str(good), *config_file]) == 0
    assert main(["fairkv", "map", "--profile", str(write_json("b.json", bad)), *size]) == 1
    assert "is the profile of 'x/other', not of" in capsys.readouterr().err
    short = write_json("c.json", {"model": "x/tiny", "budgets": rows[:-1]})
    assert main(["fairkv", "map", "--profile", str(short), *size]) == 1
    assert f"{len(rows) - 1} layers of" in capsys.readouterr().err
    assert main(["fairkv", "map", "--profile", str(good), "--tp", "1", "--model", "/no/such", "--json", out]) == 1
    assert "megakv: error: --model /no/such: no model config in '/no/such'" in capsys.readouterr().err
