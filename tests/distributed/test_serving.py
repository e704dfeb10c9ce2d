"""A served engine on real ranks: answers as alone, nothing read twice, a restart from disk, a rank that is killed."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.distributed.launch import Result, run_ranks
from tests.distributed.models import save_model
from tests.mappings import random_mapping

SCRIPT = Path(__file__).parent / "ranks" / "serving.py"
TIMEOUT = 240
PATIENCE_SECONDS = 10.0
SOON_SECONDS, TRIES = 1.0, 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model's folder."""
    return save_model(tmp_path / "model", vocab_size=128)


def launch(tmp_path: Path, model: Path, mesh: str, stage: str, store: Path | None = None) -> tuple[Result, Path]:
    """A launch on so many ranks as the mesh has, and the file that its rank 0 writes."""
    cp, tp = (int(part) for part in mesh.split("x"))
    out = tmp_path / f"{stage}-{mesh}.json"
    folder = "-" if store is None else store
    return run_ranks(SCRIPT, out, model, mesh, stage, folder, ranks=cp * tp, timeout=TIMEOUT), out


def check_answers(clients: list[dict[str, Any]]) -> None:
    """They are the engine's alone, up to where they were cancelled."""
    for client in clients:
        assert client["why"] in ("length", "cancelled"), client
        assert client["tokens"] == client["alone"][: len(client["tokens"])], client
        assert client["why"] == "cancelled" or len(client["tokens"]) == client["new"]


@pytest.mark.parametrize("mesh", ["2x1", "1x2", pytest.param("2x2", marks=pytest.mark.full)])
def test_answers_are_the_engine_s_alone_whatever_else_runs(tmp_path: Path, model: Path, mesh: str) -> None:
    result, out = launch(tmp_path, model, mesh, "random")
    result.check()
    found = json.loads(out.read_text())
    check_answers(found["clients"])
    again = found["clients"][-1]
    assert again["cached"] == len(again["prompt"]) - 1
    assert found["left"] == [0, 0]
    assert found["documents"] > 0
    stats = found["stats"]
    assert stats["accepted"] > 0
    # Some were cancelled before they were read to the end.
    assert stats["hit"] > 0 and stats["hit"] + stats["computed"] <= stats["prompt"]


@pytest.mark.parametrize("mesh", ["2x1", pytest.param("1x2", marks=pytest.mark.full)])
def test_rotary_frequencies_may_follow_the_length(tmp_path: Path, mesh: str) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0, 1.05, 1.1, 1.2], "long_factor": [1.0, 1.5, 3.0, 8.0]}
    model = save_model(tmp_path / "model", vocab_size=128, rope_parameters=rope)
    result, out = launch(tmp_path, model, mesh, "random")
    result.check()
    check_answers(json.loads(out.read_text())["clients"])


@pytest.mark.parametrize("mesh", ["2x1", pytest.param("1x2", marks=pytest.mark.full)])
def test_caches_are_compressed_where_that_is_asked_for(tmp_path: Path, model: Path, mesh: str) -> None:
    """Those answers are the engine's with its budget, all others exact."""
    result, out = launch(tmp_path, model, mesh, "budget")
    result.check()
    found = json.loads(out.read_text())
    check_answers(found["clients"])
    compressed = [client for client in found["clients"] if client["compresses"]]
    assert compressed and all(client["cached"] in (0, None) for client in compressed)
    again = found["clients"][-1]
    assert again["cached"] == len(again["prompt"]) - 1


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        pytest.param(mesh, stage, marks=pytest.mark.drawn(2, "own passes"))
        for mesh, stage in (("2x1", "offload"), ("1x2", "offload"), ("1x2", "mapping"), ("2x2", "mapping"))
    ],
)
def test_caches_off_the_device_or_with_mapped_heads_are_served(
    tmp_path: Path, model: Path, mesh: str, stage: str
) -> None:
    """In passes of their own; of offloaded ones prefixes are kept, of those with copies of heads none."""
    mapping = tmp_path / "mapping.json"
    layers = AutoConfig.from_pretrained(model)
    random_mapping(layers.num_hidden_layers, layers.num_key_value_heads, 2).save(mapping)
    result, out = launch(tmp_path, model, mesh, stage, mapping if stage == "mapping" else tmp_path / "store")
    result.check()
    found = json.loads(out.read_text())
    check_answers(found["clients"])
    again, stats = found["clients"][-1], found["stats"]
    assert again["cached"] == (0 if stage == "mapping" else len(again["prompt"]) - 1)
    assert (stats["hit"] > 0) == (stage == "offload") and stats["accepted"] > 0


@pytest.mark.parametrize(("before", "after"), [("2x1", "1x1"), ("1x1", "2x1")])
def test_prefixes_outlast_sigkill_and_another_number_of_ranks(
    tmp_path: Path, model: Path, before: str, after: str
) -> None:
    store = tmp_path / "store"
    result, out = launch(tmp_path, model, before, "store", store)
    # They killed themselves.
    assert set(result.codes) <= {-9, -15} and -9 in result.codes, result
    first = json.loads(out.read_text())["clients"]
    assert [client["cached"] for client in first] == [0, 100]
    result, out = launch(tmp_path, model, after, "restored", store)
    result.check()
    found = json.loads(out.read_text())
    check_answers(found["clients"])
    # Answers are kept, too: all but the last token of either prompt.
    assert [client["cached"] for client in found["clients"]] == [len(client["prompt"]) - 1 for client in first]
    assert [client["tokens"] for client in found["clients"]] == [client["tokens"] for client in first]


@pytest.mark.parametrize("mesh", ["2x1", "1x2"])
def test_clients_hear_of_a_rank_that_was_killed(tmp_path: Path, model: Path, mesh: str) -> None:
    result, out = launch(tmp_path, model, mesh, "killed")
    assert result.codes[-1] == -9 and result.codes[0] not in (0, None), result
    assert result.leftovers == []
    found, gone = json.loads(out.read_text()), float(out.with_suffix(".gone").read_text())
    for client in found["clients"]:
        assert client["why"] == "error" and "rank 1" in client["message"] and "lost" in client["message"], client
        assert client["ended_at"] - gone < PATIENCE_SECONDS
    assert "takes no more requests" in found["late"]


@pytest.mark.parametrize(
    ("error", "victim"),
    [
        pytest.param(error, victim, marks=pytest.mark.drawn(1))
        for error in ("MemoryError", "OSError", "KeyboardInterrupt", "SystemExit", "KeyError")
        for victim in (0, 1)
    ],
)
def test_clients_hear_at_once_of_a_rank_that_ends_with_any_error(
    tmp_path: Path, model: Path, error: str, victim: int
) -> None:
    for _ in range(TRIES):
        for left in tmp_path.glob("*.now"):
            left.unlink()
        result, out = launch(tmp_path, model, "2x1", f"raises {error} {victim}")
        assert result.leftovers == [] and not {0, None} & set(result.codes), result
        assert f"rank {victim} ends because it failed: {error}" in result.stderr, result.stderr
        found, gone = json.loads(out.read_text()), float(out.with_suffix(".gone").read_text())
        for client in found["clients"]:
            said = "the server failed" if victim == 0 else "rank 1 (host"
            assert client["why"] == "error" and said in client["message"], client
        assert "takes no more requests" in found["late"]
        if all(client["ended_at"] - gone < SOON_SECONDS for client in found["clients"]):
            return
    raise AssertionError([client["ended_at"] - gone for client in found["clients"]])
