"""The published numbers, and which of them constants may be fitted to."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PATH = Path(__file__).with_name("published.json")
DIFFERING = 0.03
"""Two published values closer than this have no winner."""

Use = Literal["fitted", "held_out", "reported"]
Setting = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One published table."""

    name: str
    paper: str
    source: str
    quantity: str
    unit: str
    rows: Sequence[Setting]
    columns: Sequence[Setting]
    values: Sequence[Sequence[float | None]]
    compared: str | None = None
    reported: Sequence[Setting] = ()
    note: str = ""

    def use(self, row: int, column: int) -> Use:
        """Cells are fitted and held out in turn, like the fields of a chess board; a single column's by its rows."""
        if any(each.items() <= self.columns[column].items() for each in self.reported):
            return "reported"
        return "held_out" if (row + column) % 2 else "fitted"


@dataclass(frozen=True)
class Cell:
    """One published value."""

    table: Table
    row: int
    column: int

    def __hash__(self) -> int:
        return hash((self.table.name, self.row, self.column))

    @property
    def setting(self) -> dict[str, Any]:
        """Setting that the value was measured with."""
        return {**self.table.rows[self.row], **self.table.columns[self.column]}

    @property
    def value(self) -> float:
        """The published number."""
        value = self.table.values[self.row][self.column]
        assert value is not None
        return value

    @property
    def use(self) -> Use:
        """Purpose that the value serves."""
        return self.table.use(self.row, self.column)


@dataclass(frozen=True)
class Headline:
    """A figure that a paper puts first."""

    published: float
    predicted: float
    use: Use  # That of its cell, or of the cell that it follows from; ``reported``: neither fitted nor judged


def load_tables() -> dict[str, Table]:
    """The published tables by name."""
    return {table["name"]: Table(**table) for table in json.loads(PATH.read_text(encoding="utf-8"))["tables"]}


def cells_of(table: Table) -> list[Cell]:
    """All values of a table, row by row."""
    return [
        Cell(table, row, column)
        for row, values in enumerate(table.values)
        for column, value in enumerate(values)
        if value is not None
    ]


def pairs_of(table: Table) -> list[tuple[Cell, Cell]]:
    """Values that the paper compares with each other, and that differ: of one row, all else equal."""
    key = table.compared
    if key is None:
        return []
    found = []
    for one, other in itertools.combinations(cells_of(table), 2):
        if one.row != other.row or "reported" in (one.use, other.use):
            continue
        first, second = table.columns[one.column], table.columns[other.column]
        same = all(first[name] == second[name] for name in (first.keys() & second.keys()) - {key})
        apart = abs(one.value - other.value) / min(one.value, other.value)
        if same and first[key] != second[key] and apart > DIFFERING:
            found.append((one, other))
    return found
