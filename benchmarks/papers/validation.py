"""All predictions beside all published numbers: constants, errors, winners and headlines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from . import context_parallel, fairkv, offload
from .fit import at_bounds, fitted
from .published import Cell, Headline, Table, cells_of, pairs_of
from .runahead import CONSTANTS as RUNAHEAD_CONSTANTS
from .runahead import NAMES as RUNAHEAD_NAMES
from .runahead import RunaheadTables

HEADLINE_BAR = 0.15
FAIRKV_HEADLINE = "fairkv_throughput"


@dataclass
class Validation:
    """Predictions of all tables."""

    predicted: dict[tuple[str, int, int], float] = field(default_factory=dict)  # By table, row and column
    constants: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # Fitted, by group of tables that share them
    # Of these, the names of those whose search ended at a bound
    at_bounds: dict[str, list[str]] = field(default_factory=dict)
    headlines: dict[str, Headline] = field(default_factory=dict)  # By name

    def of(self, cell: Cell) -> float:
        """The prediction of a cell."""
        return self.predicted[cell.table.name, cell.row, cell.column]

    def error(self, cell: Cell) -> float:
        """Predicted over published, less one."""
        return self.of(cell) / cell.value - 1

    def add(self, cells: Sequence[Cell], predict: Callable[[Cell], float]) -> None:
        """Predict some cells."""
        for cell in cells:
            self.predicted[cell.table.name, cell.row, cell.column] = predict(cell)


def validate(tables: Mapping[str, Table]) -> Validation:
    """Fit and predict everything."""
    found = Validation()

    def cells(names: Sequence[str]) -> list[Cell]:
        return [cell for name in names for cell in cells_of(tables[name])]

    known = cells(RUNAHEAD_NAMES)
    chains = RunaheadTables()
    values = found.constants["runahead"] = chains.fit(known)
    found.at_bounds["runahead"] = at_bounds(values, RUNAHEAD_CONSTANTS)
    found.add(known, partial(chains.predict, constants=values))

    for group, names, constants, predict in (
        ("context_parallel", context_parallel.NAMES, context_parallel.CONSTANTS, context_parallel.predict),
        ("kvpr_a100", offload.LARGE_GPU, offload.CONSTANTS, offload.predict),
        ("kvpr_rtx5000", offload.SMALL_GPU, offload.SMALL_CONSTANTS, offload.predict),
    ):
        known = cells(names)
        values = found.constants[group] = fitted(known, constants, predict)
        found.at_bounds[group] = at_bounds(values, constants)
        found.add(known, partial(predict, constants=values))
    rings = found.constants["context_parallel"]
    found.headlines |= context_parallel.headlines(rings, tables[context_parallel.WHOLE_PROMPTS])

    known = cells(fairkv.NAMES)
    skews = fairkv.fit(known)
    found.constants["fairkv"] = skews
    found.add(known, lambda cell: fairkv.predict(cell, skews[cell.setting["model"]]))
    for cell in cells([FAIRKV_HEADLINE]):
        setting = cell.setting
        gain = fairkv.gain(skews[setting["model"]], tp=setting["tp"], copied=setting["copied"])
        found.predicted[cell.table.name, cell.row, cell.column] = gain
        found.headlines[FAIRKV_HEADLINE] = Headline(cell.value, gain, cell.use)
    return found


def rows_of(tables: Mapping[str, Table], found: Validation) -> list[dict[str, Any]]:
    """Every predicted cell."""
    return [
        {
            "paper": table.paper,
            "source": table.source,
            "table": table.name,
            "setting": cell.setting,
            "use": cell.use,
            "unit": table.unit,
            "published": cell.value,
            "predicted": found.of(cell),
            "error": found.error(cell),
        }
        for table in tables.values()
        for cell in cells_of(table)
        if (table.name, cell.row, cell.column) in found.predicted
    ]


def summarise(tables: Mapping[str, Table], found: Validation) -> dict[str, Any]:
    """Errors by table and altogether, winners, headlines and constants."""
    cells = [cell for table in tables.values() for cell in cells_of(table) if cell.use != "reported"]
    pairs = [pair for table in tables.values() for pair in pairs_of(table)]
    wrong = [pair for pair in pairs if (found.of(pair[0]) < found.of(pair[1])) != (pair[0].value < pair[1].value)]
    return {
        "held_out_median_error": _median(found, cells, "held_out"),
        "fitted_median_error": _median(found, cells, "fitted"),
        "held_out_cells": sum(cell.use == "held_out" for cell in cells),
        "tables": {
            table.name: _table(found, table) for table in tables.values() if any(c.table is table for c in cells)
        },
        "winners": {
            "right_share": 1 - len(wrong) / len(pairs),
            "pairs": len(pairs),
            "wrong": [_pair(found, pair) for pair in wrong],
        },
        "headlines": {
            name: {
                "published": each.published,
                "predicted": each.predicted,
                "error": each.predicted / each.published - 1,
                "within_bar": abs(each.predicted / each.published - 1) <= HEADLINE_BAR,
                "use": each.use,
            }
            for name, each in found.headlines.items()
        },
        "constants": found.constants,
        "constants_at_bounds": found.at_bounds,
        "reported": {
            "context_parallel_tipping_point": context_parallel.around_the_tipping_point(
                found.constants["context_parallel"], tables[context_parallel.BREAKDOWN]
            ),
            "kvpr_table_1_recomputation_flops": [
                {**cell.setting, "implied_flops": offload.implied_flops(cell)}
                for cell in cells_of(tables["kvpr_table_1"])
                if cell.setting["part"] == "recomputation"
            ],
            "notes": {table.name: table.note for table in tables.values() if table.note},
        },
    }


def _median(found: Validation, cells: Sequence[Cell], use: str) -> float | None:
    errors = [abs(found.error(cell)) for cell in cells if cell.use == use]
    return median(errors) if errors else None


def _table(found: Validation, table: Table) -> dict[str, Any]:
    cells = cells_of(table)
    pairs = pairs_of(table)
    right = sum((found.of(one) < found.of(other)) == (one.value < other.value) for one, other in pairs)
    return {
        "cells": len(cells),
        "fitted_median_error": _median(found, cells, "fitted"),
        "held_out_median_error": _median(found, cells, "held_out"),
        "held_out_largest_error": max(abs(found.error(cell)) for cell in cells if cell.use == "held_out"),
        "pairs": len(pairs),
        "right_winners": right,
    }


def _pair(found: Validation, pair: tuple[Cell, Cell]) -> dict[str, Any]:
    return {
        "table": pair[0].table.name,
        "cells": [{**cell.setting, "published": cell.value, "predicted": found.of(cell)} for cell in pair],
    }
