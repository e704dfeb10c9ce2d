"""What the cells of `runahead.py` say: speed-ups, bounds, regret of `auto`, losses to a noisy neighbour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megakv.costmodel.context_parallel import causal_bound, dense_bound

from .choices import Cell, judge
from .noise import ELSEWHERE, LINK, QUIET
from .statistics import Interval, median, paired_ratio, unpaired_ratio

Row = Mapping[str, Any]
SPEEDUPS = (
    *((own, peer) for own in ("kvr_s", "kvr_p", "kvr_e") for peer in ("tsp", "tsp_causal", "tp", "tp_gloo", "pass_kv")),
    ("kvr_s", "kvr_e"),
    ("pass_kv", "tsp"),
)
"""Method and peer: the peer's time over the method's."""
TIME_RATIOS = (("kvr_p", "kvr_s"), ("kvr_s", "kvr_silent"))
"""Time of the one over that of the other."""
PREDICTED = {"single": "one_rank", "runahead": "kvr_s", "pass_kv": "pass_kv", "pass_q": "pass_q"}
"""What `auto` calls a candidate, and the method that it is here."""
CHOICES = ("one_rank", "kvr_e", "kvr_s", "pass_kv", "pass_q")
"""What `auto` may choose from, with any partition."""


@dataclass(frozen=True)
class Setting:
    """What the rows of one cell share."""

    ranks: int
    kv_heads: int
    rate: str  # Of the links
    context: int  # Tokens of the prompt

    @classmethod
    def of(cls, row: Row) -> Setting:
        """That of a row."""
        return cls(row["ranks"], row["kv_heads"], row["rate"], row["context"])

    @property
    def group(self) -> str:
        """The name of all contexts together."""
        return f"r{self.ranks}-kv{self.kv_heads}-{self.rate}"

    @property
    def name(self) -> str:
        """The name of the cell."""
        return f"{self.group}-{self.context}"


def cells_of(rows: Sequence[Row]) -> dict[Setting, dict[str, Row]]:
    """Per cell, its rows by method; those beside a noisy neighbour are called ``METHOD, link`` and the like."""
    cells: dict[Setting, dict[str, Row]] = {}
    for row in rows:
        suffix = "" if row["noise"] == QUIET else f", {row['noise']}"
        cells.setdefault(Setting.of(row), {})[row["method"] + suffix] = row
    order = sorted(cells, key=lambda cell: (cell.rate != "free", cell.rate, -cell.kv_heads, cell.ranks, cell.context))
    return {setting: cells[setting] for setting in order}


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The verdicts over all rows."""
    cells = cells_of(rows)
    summary: dict[str, Any] = {"cells": {}}
    for setting, found in cells.items():
        summary["cells"][setting.name] = summarise_cell(setting, found)
    for kind, of_cell in (("regret", _choice), ("choice_regret", _judged_by_samples)):
        judged = {setting.name: cell for setting, found in cells.items() if (cell := of_cell(found)) is not None}
        if judged:
            regrets = {name: summary["cells"][name]["auto"][kind] for name in judged}
            worst = max(regrets, key=lambda name: regrets[name]["value"])
            summary[f"auto_{kind}"] = {
                "mean": judge(list(judged.values()))["intervals"]["auto_mean_regret"],
                "largest": {"cell": worst, **regrets[worst]},
            }
    summary["noise_loss"] = _losses_by_group(cells)
    differences = [row["max_logit_difference"] for row in rows if row["max_logit_difference"] is not None]
    summary["max_logit_difference"] = max(differences)
    return summary


def summarise_cell(setting: Setting, rows: Mapping[str, Row]) -> dict[str, Any]:
    """The verdicts over one cell."""
    seconds = {name: row["seconds"] for name, row in rows.items()}
    found: dict[str, Any] = {
        "ranks": setting.ranks,
        "kv_heads": setting.kv_heads,
        "rate": setting.rate,
        "context": setting.context,
        "ttft_s": {name: median(times).to_json() for name, times in seconds.items()},
        "speedup": _ratios(seconds, {f"{own}/{peer}": (peer, own) for own, peer in SPEEDUPS}),
        "time_ratio": _ratios(seconds, {f"{own}/{other}": (own, other) for own, other in TIME_RATIOS}),
        "bounds_s": {name: value.to_json() for name, value in bounds(seconds, setting.ranks).items()},
        "over_bound": {name: value.to_json() for name, value in over_bounds(seconds, setting.ranks).items()},
        "partition": {name: row["partition"] for name, row in rows.items() if row["partition"] is not None},
        "noise_loss": losses(seconds),
    }
    cell = _choice(rows)
    if cell is not None:
        found["auto"] = {
            "chose": rows["auto"]["auto"],
            "regret": judge([cell])["intervals"]["auto_mean_regret"],
            "predicted_over_measured": _predictions(rows),
        }
        choice = _judged_by_samples(rows)
        if choice is not None:
            found["auto"]["choice_regret"] = judge([choice])["intervals"]["auto_mean_regret"]
    return found


def _predictions(rows: Mapping[str, Row]) -> dict[str, float]:
    """What the cost model said of each candidate over what it took."""
    predicted = rows["auto"]["candidates_s"]
    pairs = {name: measured for name, measured in PREDICTED.items() if name in predicted and measured in rows}
    return {name: predicted[name] / median(rows[measured]["seconds"]).value for name, measured in pairs.items()}


def _ratios(
    seconds: Mapping[str, Sequence[float]], pairs: Mapping[str, tuple[str, str]]
) -> dict[str, dict[str, float]]:
    return {
        name: paired_ratio(seconds[above], seconds[below]).to_json()
        for name, (above, below) in pairs.items()
        if above in seconds and below in seconds
    }


def bounds(seconds: Mapping[str, Sequence[float]], ranks: int) -> dict[str, Interval]:
    """Lower bounds of the TTFT on so many ranks (KV-Runahead, Section 3)."""
    found: dict[str, Interval] = {}
    if "single" in seconds:
        found["causal"] = median(seconds["single"]).scaled(causal_bound(1.0, ranks))
    if "single_masked" in seconds:
        found["masked"] = median(seconds["single_masked"]).scaled(dense_bound(1.0, ranks))
    if "kvr_silent" in seconds:
        found["silent"] = median(seconds["kvr_silent"])
    return found


def over_bounds(seconds: Mapping[str, Sequence[float]], ranks: int) -> dict[str, Interval]:
    """KVR-S's time over each bound that was measured apart from it, in runs of their own."""
    if "kvr_s" not in seconds:
        return {}
    found: dict[str, Interval] = {}
    if "single" in seconds:
        found["causal"] = unpaired_ratio(seconds["kvr_s"], seconds["single"]).scaled(1 / causal_bound(1.0, ranks))
    if "single_masked" in seconds:
        found["masked"] = unpaired_ratio(seconds["kvr_s"], seconds["single_masked"]).scaled(1 / dense_bound(1.0, ranks))
    return found


def losses(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, dict[str, float]]]:
    """What a competing flow costs each method (KV-Runahead, Figure 11), as a part of its time."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, quiet in seconds.items():
        noisy = {where: seconds[f"{name}, {where}"] for where in (ELSEWHERE, LINK) if f"{name}, {where}" in seconds}
        if not noisy:
            continue
        found[name] = {where: _loss(times, quiet).to_json() for where, times in noisy.items()}
        if len(noisy) == 2:
            found[name]["link_alone"] = _loss(noisy[LINK], noisy[ELSEWHERE]).to_json()
    return found


def _loss(noisy: Sequence[float], quiet: Sequence[float]) -> Interval:
    ratio = paired_ratio(noisy, quiet)
    return Interval(ratio.value - 1, ratio.low - 1, ratio.high - 1)


def _losses_by_group(cells: Mapping[Setting, Mapping[str, Row]]) -> dict[str, Any]:
    """Per group and method, the mean over the contexts, as in Figure 11: rounds of each context are drawn apart."""
    drawn: dict[str, dict[str, dict[str, list[Interval]]]] = {}
    for setting, rows in cells.items():
        for method, kinds in losses({name: row["seconds"] for name, row in rows.items()}).items():
            for kind, value in kinds.items():
                drawn.setdefault(setting.group, {}).setdefault(method, {}).setdefault(kind, []).append(
                    Interval(**value)
                )
    return {
        group: {
            method: {kind: _mean(values).to_json() for kind, values in kinds.items()}
            for method, kinds in methods.items()
        }
        for group, methods in drawn.items()
    }


def _mean(values: Sequence[Interval]) -> Interval:
    """The mean of independent estimates; their half-widths add up in squares."""
    value = float(np.mean([each.value for each in values]))
    below = float(np.sqrt(sum((each.value - each.low) ** 2 for each in values))) / len(values)
    above = float(np.sqrt(sum((each.high - each.value) ** 2 for each in values))) / len(values)
    return Interval(value, value - below, value + above)


def _judged_by_samples(rows: Mapping[str, Row]) -> Cell | None:
    """The same by the samples of the method that `auto` chose; None where its partition was not measured."""
    cell = _choice(rows)
    if cell is None:
        return None
    chose, searched = rows["auto"]["auto"], rows.get("kvr_s")
    if chose == "runahead" and searched is not None and searched["partition"] == rows["auto"]["partition"]:
        chose = "kvr_s"
    others = {method: times for method, times in cell.seconds.items() if method != "auto"}
    return Cell(1.0, others, chose) if chose in others and len(others) > 1 else None


def _choice(rows: Mapping[str, Row]) -> Cell | None:
    """The cell as one that `auto` chose in, against every single choice that was measured beside it."""
    seconds = {name: rows[name]["seconds"] for name in CHOICES if name in rows}
    if "auto" not in rows or not seconds:
        return None
    return Cell(1.0, {**seconds, "auto": rows["auto"]["seconds"]}, "auto")
