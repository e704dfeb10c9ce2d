"""All predictions beside all published numbers: constants, errors, winners and headlines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

from . import context_parallel, fairkv, offload, runahead
from .fit import fitted
from .published import Cell, Headline, Table, cells_of, pairs_of

HEADLINE_BAR = 0.15
FAIRKV_HEADLINE = "fairkv_throughput"


@dataclass
class Validation:
    """Predictions of all tables."""

    tables: Mapping[str, Table]
    predicted: dict[Cell, float] = field(default_factory=dict)
    constants: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # Fitted, by group of tables that share them
    headlines: dict[str, Headline] = field(default_factory=dict)  # By name

    def cells(self, names: Sequence[str]) -> list[Cell]:
        return [cell for name in names for cell in cells_of(self.tables[name])]

    def error(self, cell: Cell) -> float:
        """Predicted over published, less one."""
        return self.predicted[cell] / cell.value - 1

    def add(self, cells: Sequence[Cell], predict: Callable[[Cell], float]) -> None:
        """Predict some cells."""
        self.predicted |= {cell: predict(cell) for cell in cells}

    def right(self, pair: tuple[Cell, Cell]) -> bool:
        """Whether the faster one of a pair is predicted to be."""
        one, other = pair
        return (self.predicted[one] < self.predicted[other]) == (one.value < other.value)

    def median_error(self, cells: Sequence[Cell], use: str) -> float | None:
        errors = [abs(self.error(cell)) for cell in cells if cell.use == use]
        return median(errors) if errors else None


def validate(tables: Mapping[str, Table]) -> Validation:
    """Fit and predict everything."""
    found = Validation(tables)
    chains = runahead.RunaheadTables()
    rings, chain = context_parallel.CONSTANTS, runahead.CONSTANTS
    for group, names, constants, fit, predict in (
        ("runahead", runahead.NAMES, chain, chains.fit, chains.predict),
        ("context_parallel", context_parallel.NAMES, rings, None, context_parallel.predict),
        ("kvpr_a100", offload.LARGE_GPU, offload.CONSTANTS, None, offload.predict),
        ("kvpr_rtx5000", offload.SMALL_GPU, offload.SMALL_CONSTANTS, None, offload.predict),
    ):
        known = found.cells(names)
        values = found.constants[group] = fitted(known, constants, predict) if fit is None else fit(known)
        found.add(known, partial(predict, constants=values))
    whole = tables[context_parallel.WHOLE_PROMPTS]
    found.headlines |= context_parallel.headlines(found.constants["context_parallel"], whole)

    known = found.cells(fairkv.NAMES)
    skews = found.constants["fairkv"] = fairkv.fit(known)
    found.add(known, lambda cell: fairkv.predict(cell, skews[cell.setting["model"]]))
    (cell,) = found.cells([FAIRKV_HEADLINE])
    gain = fairkv.gain(skews[cell.setting["model"]], tp=cell.setting["tp"], copied=cell.setting["copied"])
    found.add([cell], lambda _: gain)
    found.headlines[FAIRKV_HEADLINE] = Headline(cell.value, gain, cell.use)
    return found


def rows_of(found: Validation) -> list[dict[str, Any]]:
    """Every predicted cell."""
    rows = []
    for cell in [cell for cell in found.cells(list(found.tables)) if cell in found.predicted]:
        place = {"paper": cell.table.paper, "source": cell.table.source, "table": cell.table.name}
        row = {**place, "setting": cell.setting, "use": cell.use, "unit": cell.table.unit, "published": cell.value}
        rows.append({**row, "predicted": found.predicted[cell], "error": found.error(cell)})
    return rows


def summarise(found: Validation) -> dict[str, Any]:
    """Errors by table and altogether, winners, headlines and constants."""
    tables = found.tables
    cells = [cell for cell in found.cells(list(tables)) if cell.use != "reported"]
    pairs = [pair for table in tables.values() for pair in pairs_of(table)]
    wrong = [pair for pair in pairs if not found.right(pair)]
    headlines = {}
    for name, each in found.headlines.items():
        error = each.predicted / each.published - 1
        headlines[name] = {**asdict(each), "error": error, "within_bar": abs(error) <= HEADLINE_BAR}
    return {
        "held_out_median_error": found.median_error(cells, "held_out"),
        "fitted_median_error": found.median_error(cells, "fitted"),
        "held_out_cells": sum(cell.use == "held_out" for cell in cells),
        "tables": {name: _table(found, tables[name]) for name in dict.fromkeys(cell.table.name for cell in cells)},
        "winners": {
            "right_share": 1 - len(wrong) / len(pairs),
            "pairs": len(pairs),
            "wrong": [
                {
                    "table": pair[0].table.name,
                    "cells": [{**c.setting, "published": c.value, "predicted": found.predicted[c]} for c in pair],
                }
                for pair in wrong
            ],
        },
        "headlines": headlines,
        "constants": found.constants,
        "notes": {table.name: table.note for table in tables.values() if table.note},
    }


def _table(found: Validation, table: Table) -> dict[str, Any]:
    cells, pairs = cells_of(table), pairs_of(table)
    return {
        "cells": len(cells),
        "fitted_median_error": found.median_error(cells, "fitted"),
        "held_out_median_error": found.median_error(cells, "held_out"),
        "held_out_largest_error": max(abs(found.error(cell)) for cell in cells if cell.use == "held_out"),
        "pairs": len(pairs),
        "right_winners": sum(map(found.right, pairs)),
    }
