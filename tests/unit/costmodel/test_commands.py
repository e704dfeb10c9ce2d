"""The commands that measure refuse what cannot work before they start a rank."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from megakv.launcher.command import main
from megakv.launcher.ranks import command_line
from tests.families import llama


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "--ranks", "1"], "--ranks 1 with --tp 1: allowed: a multiple of --tp, twice it or more"),
        (["profile", "--ranks", "6", "--tp", "4"], "--ranks 6 with --tp 4: allowed: a multiple"),
        (["profile", "--ranks", "4", "--tp", "0"], "--ranks 4 with --tp 0: allowed: a multiple"),
        (["profile", "--threads", "0"], "--threads 0: allowed: 1 or more"),
        (["profile", "--seconds", "0.5"], "--seconds 0.5: allowed: 1 to 36000"),
        (["profile", "--model", "/no/such"], "--model: no model config in '/no/such'"),
        (["fit-policy", "--model", "/no/such"], "--model: no model config in '/no/such'"),
    ],
)
def test_impossible_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out.json"
    assert main([*arguments, "--json", str(out)]) == 1
    assert f"megakv: error: {message}" in capsys.readouterr().err
    assert not out.exists()


def test_unwritable_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "missing" / "out.json"):
        assert main(["profile", "--json", str(path)]) == 1
        assert f"--json {path}: cannot be written" in capsys.readouterr().err


def test_short_contexts_are_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path)
    command = ["fit-policy", "--model", str(tmp_path), "--ranks", "4", "--tokens", "7", "--json", str(tmp_path / "f")]
    assert main(command) == 1
    assert "--tokens 7: allowed: 8 or more" in capsys.readouterr().err


def test_heads_that_cannot_be_divided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path)
    out = tmp_path / "out.json"
    assert main(["profile", "--model", str(tmp_path), "--ranks", "6", "--tp", "3", "--json", str(out)]) == 1
    message = capsys.readouterr().err
    assert "--model: " in message and "tensor_parallel.tp_size = 3" in message


def test_missing_arguments_end_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["profile"], ["fit-policy", "--json", "x"], ["profile", "--dtype", "int3", "--json", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage: megakv" in capsys.readouterr().err


def test_arguments_reach_the_ranks() -> None:
    given = {"seconds": 2.5, "model": None, "tokens": [3, 4], "full_grid": True, "no_chat": False, "json": "a b.json"}
    arguments = Namespace(command="profile", ranks=2, run=main, local_rank=0, **given)
    words = command_line(arguments)
    assert words == ["--seconds", "2.5", "--tokens", "3", "4", "--full-grid", "--json", "a b.json"]


def test_other_commands_still_write_their_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "info.json"
    assert main(["info", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert json.loads(out.read_text()) == json.loads(shown[shown.index("{") :])
