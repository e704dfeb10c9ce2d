"""The order of the house: a room imports only rooms below it, and holds no more lines than its budget.

`tests/rooms.json` lists the rooms from the top down, each with its budget in lines of Python. Budgets go down.
"""

import json
from pathlib import Path

import pytest

from tests.unit.test_imports import imported, modules

ROOT = Path(__file__).parents[2]
ROOMS: dict[str, int] = dict(json.loads((ROOT / "tests" / "rooms.json").read_text()))
FACE = {"megakv", "megakv.__main__", "megakv.version"}
"""Modules that belong to no room: what users import first."""


def room_of(name: str) -> str:
    """The room of a module: the folder that it lies in."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and name not in FACE else ""


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    return modules()


def test_every_file_is_in_a_room(files: dict[str, Path]) -> None:
    strangers = {name for name in files if name not in FACE and (room_of(name) not in ROOMS or is_loose(name, files))}
    assert not strangers


def is_loose(name: str, files: dict[str, Path]) -> bool:
    """Whether a module lies beside the rooms instead of in one."""
    return name.count(".") == 1 and files[name].name != "__init__.py"


def test_a_room_imports_only_rooms_below_it(files: dict[str, Path]) -> None:
    floors = {room: floor for floor, room in enumerate(ROOMS)}
    upwards = {
        f"{name} -> {other}"
        for name, path in files.items()
        for other in imported(path)
        if name not in FACE and other in files and other not in FACE and floors[room_of(other)] < floors[room_of(name)]
    }
    assert not upwards


def test_rooms_keep_to_their_budgets(files: dict[str, Path]) -> None:
    lines = dict.fromkeys(ROOMS, 0)
    for name, path in files.items():
        if name not in FACE:
            lines[room_of(name)] += path.read_text().count("\n")
    assert {room: count for room, count in lines.items() if count > ROOMS[room]} == {}
