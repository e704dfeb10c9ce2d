"""Conversations stay exact over turns, batches, forks and folders, on any context-parallel degree."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "sessions.py"


def launch(folder: Path, mesh: str, stage: str, decoded: int) -> dict[str, Any]:
    cp, tp = (int(part) for part in mesh.split("x"))
    out = folder / f"{stage}-{mesh}.json"
    run_ranks(SCRIPT, out, folder, mesh, stage, str(decoded), ranks=cp * tp, timeout=420).check()
    return json.loads(out.read_text())


def judge_turns(results: dict[str, Any], decoded: int) -> None:
    saved = results.pop("save")
    assert saved["equal"]
    for full, taken, left in saved["said"]:
        assert "the session cannot be saved to" in full and "an earlier one there stays whole" in full
        assert "exists and is no saved session" in taken and left == 2
    balance = results.pop("balance")
    assert balance["spread"] <= 1
    assert balance["tokens"] == 2 * (37 + decoded - 1)
    assert results
    for name, result in results.items():
        assert all(result["long"]["equal"]) and len(result["long"]["equal"]) == 5, name
        assert all(result["long"]["branches"]), name
        assert all(all(turn) for turn in result["ragged"]["equal"]), name
        assert result["long"]["spread"] <= 1 and result["ragged"]["spread"] <= 1, name


def judge_restored(results: dict[str, Any]) -> None:
    restored = results["restore"]
    assert restored["equal"] and restored["intact"]
    assert restored["spread"] <= 1
    expected = {
        "missing": "safetensors is missing",
        "truncated": "is truncated or broken",
        "foreign": "was saved with another model",
        "garbled": "session.json is broken",
        "no folder": "is no saved session",
        "capacity": "has positions for 4096",
    }
    for name, pattern in expected.items():
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(restored["messages"][name])


def test_turns_and_a_restore_on_fewer_ranks(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    whole = pytestconfig.getoption("--full")
    decoded = 2000 if whole else 40
    mesh, stage = ("4x1", "all") if whole else ("3x1", "quick")
    judge_turns(launch(tmp_path, mesh, stage, decoded), decoded)
    judge_restored(launch(tmp_path, "2x1", "restore", decoded))


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        *(pytest.param(*each, marks=pytest.mark.drawn(1)) for each in (("2x1", "1x2"), ("1x2", "2x1"), ("1x2", "1x1"))),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("2x2", "1x2"), ("2x1", "4x1"), ("2x1", "2x1"), ("3x1", "2x1"), ("1x4", "2x2"), ("1x1", "1x4"))
        ),
    ],
)
def test_other_meshes(tmp_path: Path, saved: str, restored: str) -> None:
    judge_turns(launch(tmp_path, saved, "quick", 100), 100)
    judge_restored(launch(tmp_path, restored, "restore", 100))


def test_saves_that_are_killed(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Whenever a save is killed, the folder holds the old session or the new one; of two jobs, one wins."""
    moments = 100 if pytestconfig.getoption("--full") else 4
    out = tmp_path / "out.json"
    script = SCRIPT.with_name("killed_saves.py")
    run_ranks(script, out, tmp_path, str(moments), ranks=1, timeout=420).check()
    results = json.loads(out.read_text())
    # A save opens, makes, renames and removes things at many steps: each was the last of one process.
    assert len(results["killed"]) >= 15 + moments and set(results["killed"]) == {-9}
    assert len(results["copies"]) == len(results["killed"]) + 2 and all(results["copies"])
    assert results["clean"] == 2
    assert results["both"] == [0, 0] and results["both left"] == ["save", "session.json"]
