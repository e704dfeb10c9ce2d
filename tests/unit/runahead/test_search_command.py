"""``megakv search-partition`` refuses what cannot work before it starts a rank, naming the argument."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megakv.launcher.command import main
from megakv.launcher.commands.search_partition import UNITS, default_unit, read_contexts
from tests.unit.runahead.tables import any_table, table


class Command:
    """The command with a config and a table of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.table = folder / "table.json"
        self.configure({"context_parallel": {"size": 3}})

    def configure(self, section: dict[str, Any], tp: int = 1) -> None:
        values = {"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}
        (self.folder / "run.json").write_text(json.dumps(values))

    def run(self, *more: str, contexts: str = "64", table: bool = True) -> int:
        words = ["--model", "/no/such", "--config", str(self.folder / "run.json"), "--contexts", contexts]
        return main(["search-partition", *words, *(["--table", str(self.table)] if table else []), *more])


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    def start(*_: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("megakv.launcher.commands.search_partition.start_ranks", start)
    return Command(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "4k"], "--contexts 4k: allowed: whole numbers of tokens"),
        (["--contexts", "64,-5"], "--contexts -5: allowed: whole numbers of tokens"),
        (["--contexts", ","], "--contexts names no length"),
        (["--contexts", "64,5"], "--contexts 5: allowed: 6 or more, two tokens for each of 3 ranks"),
        (["--contexts", "64,99999999999"], "--contexts 99999999999: allowed: 1,000,000,000 or less"),
        (["--step", "0"], "--step 0: allowed: 1 or more"),
        (["--step", "22"], "--step 22: allowed: 21 or less, for 64 tokens on 3 ranks"),
        (["--repeats", "0"], "--repeats 0: allowed: 1 or more"),
        (["--threads", "-1"], "--threads -1: allowed: 1 or more"),
        (["--ranks", "1"], "a chain has 2 ranks or more; set it, or give --ranks"),
        (["--profile", "/no/such"], "--profile = '/no/such' cannot be read"),
        (["--png", "/no/such/folder/a.png"], "--png /no/such/folder/a.png: cannot be written"),
        (["--table", "/no/such/folder/a.json"], "--table /no/such/folder/a.json: cannot be written"),
        (["--table", "table.png"], "--table table.png: the picture would overwrite it: give --png another name"),
        (["--config", "/no/such"], "config /no/such cannot be read"),
    ],
)
def test_impossible_arguments(
    command: Command, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert command.run(*arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("megakv: error: ") and message in error


def test_ranks_must_fit_the_mesh(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command.configure({"context_parallel": {"size": 1}})
    assert command.run() == 1
    assert "megakv.context_parallel.size = 1: a chain has 2 ranks or more" in capsys.readouterr().err
    command.configure({"context_parallel": {"size": 2}}, tp=2)
    assert command.run("--ranks", "5") == 1
    assert "--ranks 5: allowed: multiples of tensor_parallel.tp_size = 2" in capsys.readouterr().err


def test_a_table_must_be_named_and_be_of_this_chain(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(table=False) == 1
    assert "--table is missing: no megakv.runahead.table in the config" in capsys.readouterr().err
    command.table.write_text("{")
    assert command.run() == 1
    assert f"--table = {str(command.table)!r} is not valid JSON" in capsys.readouterr().err
    any_table(4, 2).save(command.table)
    assert command.run() == 1
    expected = "is of 4 ranks, tp 1, kv 'sharded'; this search is of 3 ranks, tp 1, kv 'sharded': name another file"
    assert expected in capsys.readouterr().err
    table({64: (1, 1, 1)}, kv="last").save(command.table)
    command.configure({"context_parallel": {"size": 3}, "runahead": {"table": str(command.table)}})
    assert command.run(table=False) == 1
    assert "kv 'last'; this search is of 3 ranks, tp 1, kv 'sharded'" in capsys.readouterr().err


def test_contexts_are_read_with_commas_and_spaces() -> None:
    assert read_contexts(["4096,8192", "1024"]) == read_contexts(["1024", "4096", "8192,"]) == [1024, 4096, 8192]


def test_units_fit_the_prompt() -> None:
    for context in (6, 64, 1000, 8192, 131072):
        for size in (2, 3, 8):
            unit = default_unit(context, size)
            assert unit == 1 or (unit * UNITS <= context and unit * size <= context)
            assert 4 * unit * UNITS > context or 4 * unit * size > context
    assert default_unit(8192, 4) == 64
