"""Everything that `runahead.py` has measured so far, as tables, charts and one file.

Tables are in the form of KV-Runahead's Tables 1, 2 and 3.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megakv.costmodel.context_parallel import causal_bound, dense_bound

from .choices import Cell, judge
from .noise import ELSEWHERE, LINK, QUIET
from .predictions import CANDIDATES, with_predictions
from .publish import Parts, publish, show_difference, show_table
from .runahead_charts import charts
from .runahead_plan import Group, profile_path
from .statistics import Interval, median, paired_ratio, unpaired_ratio

Row = Mapping[str, Any]
SEARCH = "search-"
PEERS = ("tsp", "tsp_causal", "tp", "tp_gloo", "pass_kv")
SPEEDUPS = (
    *((own, peer) for own in ("kvr_s", "kvr_p", "kvr_e") for peer in PEERS),
    ("kvr_s", "kvr_e"),
    ("pass_kv", "tsp"),
)
"""Method and peer: the peer's time over the method's."""
TIME_RATIOS = (("kvr_p", "kvr_s"), ("kvr_s", "kvr_silent"))
"""Time of the one over that of the other."""
CHOICES = ("one_rank", "kvr_e", "kvr_s", "pass_kv", "pass_q")
"""What `auto` may choose from, with any partition."""
PLACE = ("ranks", "kv_heads", "rate", "context")


def report(arguments: argparse.Namespace, parts: Parts, skipped: Mapping[str, str]) -> int:
    """Print and publish all cells that were kept; the exit status is 1 if there is none."""
    cells = [part for name in parts.names("r") if (part := parts.read(name)) is not None]
    if not cells:
        print("nothing was measured", file=sys.stderr)
        return 1
    searches = {name.removeprefix(SEARCH): found for name in parts.names(SEARCH) if (found := parts.read(name))}
    rows = [row for cell in cells for row in cell["rows"]]
    groups = {Group(row["ranks"], row["kv_heads"], row["rate"], ()) for row in rows}
    paths = {group.name: profile_path(group, arguments.profile, parts.folder) for group in groups}
    kept = {name: path for name, path in paths.items() if path.exists()}
    rows = with_predictions("runahead", arguments, rows, kept.get)
    summary = {**summarise(rows), "searches": searches, "not_measured": dict(skipped)}
    show(summary)
    publish(arguments, "runahead", cells[0]["machine"], rows, summary, charts(arguments, summary, searches))
    return 0


def cells_of(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """By cell such as ``r4-kv16-free-8192`` its rows by method; beside a neighbour ``METHOD, link`` and so on."""
    places: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        suffix = "" if row["noise"] == QUIET else f", {row['noise']}"
        places.setdefault(tuple(row[name] for name in PLACE), {})[row["method"] + suffix] = row
    order = sorted(places, key=lambda place: (place[2] != "free", place[2], -place[1], place[0], place[3]))
    return {f"r{place[0]}-kv{place[1]}-{place[2]}-{place[3]}": places[place] for place in order}


def group_of(cell: str) -> str:
    """All contexts together."""
    return cell.rpartition("-")[0]


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The verdicts over all rows: speed-ups, bounds, regret of `auto`, losses to a noisy neighbour."""
    cells = cells_of(rows)
    summary: dict[str, Any] = {"cells": {name: summarise_cell(found) for name, found in cells.items()}}
    for kind, of_cell in (("regret", _choice), ("choice_regret", _judged_by_samples)):
        judged = {name: cell for name, found in cells.items() if (cell := of_cell(found)) is not None}
        if judged:
            regrets = {name: summary["cells"][name]["auto"][kind] for name in judged}
            worst = max(regrets, key=lambda name: regrets[name]["value"])
            mean = judge(list(judged.values()))["intervals"]["auto_mean_regret"]
            summary[f"auto_{kind}"] = {"mean": mean, "largest": {"cell": worst, **regrets[worst]}}
    # Means over the contexts, as in Figure 11: rounds of each context are drawn apart.
    drawn: dict[str, dict[str, dict[str, list[Interval]]]] = {}
    for name, cell in summary["cells"].items():
        for method, kinds in cell["noise_loss"].items():
            own = drawn.setdefault(group_of(name), {}).setdefault(method, {})
            for kind, value in kinds.items():
                own.setdefault(kind, []).append(Interval(**value))
    summary["noise_loss"] = {
        group: {name: {kind: _mean(found) for kind, found in kinds.items()} for name, kinds in methods.items()}
        for group, methods in drawn.items()
    }
    differences = [row["max_logit_difference"] for row in rows if row["max_logit_difference"] is not None]
    summary["max_logit_difference"] = max(differences)
    return summary


def summarise_cell(rows: Mapping[str, Row]) -> dict[str, Any]:
    """The verdicts over one cell; times, ratios, regrets and losses have intervals."""
    seconds = {name: row["seconds"] for name, row in rows.items()}
    place = {name: next(iter(rows.values()))[name] for name in PLACE}
    bounds, over = _bounds(seconds, place["ranks"])
    found: dict[str, Any] = {
        **place,
        "ttft_s": {name: median(times).to_json() for name, times in seconds.items()},
        "speedup": _ratios(seconds, {f"{own}/{peer}": (peer, own) for own, peer in SPEEDUPS}),
        "time_ratio": _ratios(seconds, {f"{own}/{other}": (own, other) for own, other in TIME_RATIOS}),
        "bounds_s": bounds,
        "over_bound": over,
        "partition": {name: row["partition"] for name, row in rows.items() if row["partition"] is not None},
        "noise_loss": losses(seconds),
    }
    if (cell := _choice(rows)) is not None:
        said = rows["auto"]["candidates_s"]
        known = {name: own for name, own in CANDIDATES.items() if name in said and own in rows}
        found["auto"] = {
            "chose": rows["auto"]["auto"],
            "regret": judge([cell])["intervals"]["auto_mean_regret"],
            "predicted_over_measured": {name: said[name] / median(seconds[own]).value for name, own in known.items()},
        }
        if (choice := _judged_by_samples(rows)) is not None:
            found["auto"]["choice_regret"] = judge([choice])["intervals"]["auto_mean_regret"]
    return found


def _ratios(seconds: Mapping[str, Sequence[float]], pairs: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    return {
        name: paired_ratio(seconds[above], seconds[below]).to_json()
        for name, (above, below) in pairs.items()
        if above in seconds and below in seconds
    }


def _bounds(seconds: Mapping[str, Sequence[float]], ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lower bounds of the TTFT on so many ranks (KV-Runahead, Section 3), and KVR-S's time over them.

    ``causal``: TTFT(1) / p of one process that skips what is hidden; ``masked``: TTFT*(p) of Equation 3, from a process
    that computes the whole rectangle under a mask; ``silent``: the chain without communication.
    """
    shares = {"single": ("causal", causal_bound(1.0, ranks)), "single_masked": ("masked", dense_bound(1.0, ranks))}
    bounds, over = {}, {}
    for method, (name, share) in shares.items():
        if method in seconds:
            bounds[name] = median(seconds[method]).scaled(share).to_json()
            if "kvr_s" in seconds:
                over[name] = unpaired_ratio(seconds["kvr_s"], seconds[method]).scaled(1 / share).to_json()
    if "kvr_silent" in seconds:
        bounds["silent"] = median(seconds["kvr_silent"]).to_json()
    return bounds, over


def losses(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, dict[str, float]]]:
    """What a competing flow costs each method (KV-Runahead, Figure 11), as a part of its time.

    ``elsewhere``: the flow is on links of its own and only takes processor time; ``link``: it is on a link of the
    chain; ``link_alone``: the latter beyond the former, which is what sharing the link costs.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, quiet in seconds.items():
        noisy = {where: seconds[f"{name}, {where}"] for where in (ELSEWHERE, LINK) if f"{name}, {where}" in seconds}
        pairs = {where: (times, quiet) for where, times in noisy.items()}
        if len(noisy) == 2:
            pairs["link_alone"] = noisy[LINK], noisy[ELSEWHERE]
        if pairs:
            ratios = {kind: paired_ratio(*pair) for kind, pair in pairs.items()}
            found[name] = {k: Interval(r.value - 1, r.low - 1, r.high - 1).to_json() for k, r in ratios.items()}
    return found


def _mean(values: Sequence[Interval]) -> dict[str, float]:
    """The mean of independent estimates; their half-widths add up in squares."""
    value = float(np.mean([each.value for each in values]))
    below = float(np.linalg.norm([each.value - each.low for each in values])) / len(values)
    above = float(np.linalg.norm([each.high - each.value for each in values])) / len(values)
    return Interval(value, value - below, value + above).to_json()


def _choice(rows: Mapping[str, Row]) -> Cell | None:
    """The cell as one that `auto` chose in, against every single choice that was measured beside it."""
    seconds = {name: rows[name]["seconds"] for name in CHOICES if name in rows}
    if "auto" not in rows or not seconds:
        return None
    return Cell(1.0, {**seconds, "auto": rows["auto"]["seconds"]}, "auto")


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


def show(summary: Mapping[str, Any]) -> None:
    """Print all tables that there are cells for."""
    cells = list(summary["cells"].values())
    show_table("Time to first token, seconds", _times(cells))
    show_table("TSP against KVR-S (Tables 1 and 2)", table_1(cells))
    title = "Does parallel inference pay? Fastest of the chain's times in seconds (Table 3)"
    show_table(title, table_3(cells))
    lines = [["", "links", "KV heads", "ranks", "tokens", "median [95%]"]]
    for cell in cells:
        speeds = {pair: value for pair, value in cell["speedup"].items() if pair.startswith("kvr_s")}
        named = {f"speed-up of {pair.replace('/', ' over ')}": value for pair, value in speeds.items()}
        named |= {f"time of {pair.replace('/', ' over ')}": value for pair, value in cell["time_ratio"].items()}
        named |= {f"time of kvr_s over bound: {name}": value for name, value in cell["over_bound"].items()}
        lines += [[name, *_where(cell), str(Interval(**value))] for name, value in named.items()]
    show_table("Ratios of times [95%]", lines)
    lines = [["", "method", "flow on a link", "flow elsewhere", "link alone"]]
    for group, methods in summary["noise_loss"].items():
        for method, kinds in methods.items():
            shown = [_percent(kinds[kind]) if kind in kinds else "-" for kind in (LINK, ELSEWHERE, "link_alone")]
            lines.append([group, method, *shown])
    show_table("What a competing flow at half rate costs, mean over the contexts [95%] (Figure 11)", lines)
    head = ["chose", "links", "KV heads", "ranks", "tokens", "regret [95%]"]
    lines = [[*head, *(f"{name}: predicted" for name in CANDIDATES)]]
    for cell in cells:
        if auto := cell.get("auto"):
            over = auto["predicted_over_measured"]
            shown = [f"{over[name]:.2f}" if name in over else "-" for name in CANDIDATES]
            lines.append([auto["chose"], *_where(cell), _percent(auto["regret"]), *shown])
    show_table("What auto chose", lines)
    for kind, text in (("auto_regret", "auto's own runs"), ("auto_choice_regret", "the samples of what it chose")):
        if kind in summary:
            mean, worst = summary[kind]["mean"], summary[kind]["largest"]
            print(f"\nregret by {text}: mean {_percent(mean)}, largest {_percent(worst)} at {worst['cell']}")
    show_difference(summary)


def _times(cells: Sequence[Row]) -> list[list[str]]:
    """Medians of every method."""
    methods = list(dict.fromkeys(name for cell in cells for name in cell["ttft_s"] if ", " not in name))
    bounds = [name for name in ("causal", "masked") if any(name in cell["bounds_s"] for cell in cells)]
    lines = [["links", "KV heads", "ranks", "tokens", *methods, *(f"bound: {name}" for name in bounds)]]
    for cell in cells:
        found = [cell["ttft_s"].get(name) for name in methods] + [cell["bounds_s"].get(name) for name in bounds]
        lines.append([*_where(cell), *("-" if value is None else f"{value['value']:.3f}" for value in found)])
    return lines


def table_1(cells: Sequence[Row]) -> list[list[str]]:
    """TTFT of TSP and KVR-S and their ratio, for each number of ranks beside each other."""
    known = {tuple(cell[name] for name in PLACE): cell for cell in cells if "kvr_s/tsp" in cell["speedup"]}
    sizes = sorted({place[0] for place in known})
    lines = [["links", "KV heads", "tokens"]]
    lines[0] += [word for size in sizes for word in (f"TSP on {size}", "KVR-S", "speed-up [95%]")]
    for place in dict.fromkeys(place[1:] for place in known):
        kv_heads, rate, context = place
        line = [rate, str(kv_heads), f"{context:,}"]
        for size in sizes:
            if (cell := known.get((size, *place))) is None:
                line += ["-"] * 3
            else:
                line += [f"{cell['ttft_s'][name]['value']:.3f}" for name in ("tsp", "kvr_s")]
                line.append(str(Interval(**cell["speedup"]["kvr_s/tsp"])))
        lines.append(line)
    return lines


def table_3(cells: Sequence[Row]) -> list[list[str]]:
    """One rank against the chain on several, by links; a star where the chain is the faster."""
    known = [cell for cell in cells if "one_rank" in cell["ttft_s"] and "kvr_s" in cell["ttft_s"]]
    columns = list(dict.fromkeys((cell["rate"], cell["ranks"]) for cell in known))
    lines = [["KV heads", "tokens", "one rank", *(f"{size} ranks, {rate}" for rate, size in columns)]]
    for kv_heads, context in dict.fromkeys((cell["kv_heads"], cell["context"]) for cell in known):
        same = [cell for cell in known if (cell["kv_heads"], cell["context"]) == (kv_heads, context)]
        base = min(cell["ttft_s"]["one_rank"]["value"] for cell in same)
        chain = {(cell["rate"], cell["ranks"]): cell["ttft_s"]["kvr_s"]["value"] for cell in same}
        shown = [f"{chain[key]:.3f}{'*' if chain[key] < base else ' '}" if key in chain else "-" for key in columns]
        lines.append([str(kv_heads), f"{context:,}", f"{base:.3f}", *shown])
    return lines


def _where(cell: Row) -> list[str]:
    return [cell["rate"], str(cell["kv_heads"]), str(cell["ranks"]), f"{cell['context']:,}"]


def _percent(value: Mapping[str, Any]) -> str:
    return f"{value['value']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"
