"""Tables of `runahead.py`, in the form of KV-Runahead's Tables 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .noise import ELSEWHERE, LINK
from .report import align
from .runahead_summary import PREDICTED
from .statistics import Interval

Cell = Mapping[str, Any]


def show(summary: Mapping[str, Any]) -> None:
    """Print all tables that there are cells for."""
    cells = list(summary["cells"].values())
    for title, lines in (
        ("Time to first token, seconds", times(cells)),
        ("TSP against KVR-S (Tables 1 and 2)", table_1(cells)),
        ("Does parallel inference pay? Fastest of the chain's times in seconds (Table 3)", table_3(cells)),
        ("Ratios of times [95%]", ratios(cells)),
        ("What a competing flow at half rate costs, mean over the contexts [95%] (Figure 11)", noise(summary)),
        ("What auto chose", choices(cells)),
    ):
        if len(lines) > 1:
            print(f"\n{title}\n{align(lines)}")
    for kind, text in (("auto_regret", "auto's own runs"), ("auto_choice_regret", "the samples of what it chose")):
        if kind in summary:
            mean, worst = summary[kind]["mean"], summary[kind]["largest"]
            print(f"\nregret by {text}: mean {_percent(mean)}, largest {_percent(worst)} at {worst['cell']}")
    print(f"\nlargest difference of the last logits: {summary['max_logit_difference']:.1e} of the largest logit")


def times(cells: Sequence[Cell]) -> list[list[str]]:
    """Medians of every method."""
    methods = list(dict.fromkeys(name for cell in cells for name in cell["ttft_s"] if ", " not in name))
    bounds = [name for name in ("causal", "masked") if any(name in cell["bounds_s"] for cell in cells)]
    lines = [["links", "KV heads", "ranks", "tokens", *methods, *(f"bound: {name}" for name in bounds)]]
    for cell in cells:
        found = [cell["ttft_s"].get(name) for name in methods] + [cell["bounds_s"].get(name) for name in bounds]
        lines.append([*_where(cell), *("-" if value is None else f"{value['value']:.3f}" for value in found)])
    return lines


def table_1(cells: Sequence[Cell]) -> list[list[str]]:
    """TTFT of TSP and KVR-S and their ratio, for each number of ranks beside each other."""
    known = [cell for cell in cells if "kvr_s/tsp" in cell["speedup"]]
    sizes = sorted({cell["ranks"] for cell in known})
    lines = [["links", "KV heads", "tokens"]]
    for size in sizes:
        lines[0] += [f"TSP on {size}", "KVR-S", "speed-up [95%]"]
    places = dict.fromkeys((cell["rate"], cell["kv_heads"], cell["context"]) for cell in known)
    by_size = {(cell["rate"], cell["kv_heads"], cell["context"], cell["ranks"]): cell for cell in known}
    for rate, kv_heads, context in places:
        line = [rate, str(kv_heads), f"{context:,}"]
        for size in sizes:
            cell = by_size.get((rate, kv_heads, context, size))
            if cell is None:
                line += ["-"] * 3
                continue
            ttft = cell["ttft_s"]
            line += [f"{ttft['tsp']['value']:.3f}", f"{ttft['kvr_s']['value']:.3f}"]
            line.append(str(Interval(**cell["speedup"]["kvr_s/tsp"])))
        lines.append(line)
    return lines


def table_3(cells: Sequence[Cell]) -> list[list[str]]:
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


def ratios(cells: Sequence[Cell]) -> list[list[str]]:
    """Speed-ups of KVR-S, its time over its bounds, and KVR-P's over its own."""
    lines = [["", "links", "KV heads", "ranks", "tokens", "median [95%]"]]
    for cell in cells:
        shown = {pair: value for pair, value in cell["speedup"].items() if pair.startswith("kvr_s")}
        named = {f"speed-up of {pair.replace('/', ' over ')}": value for pair, value in shown.items()}
        named |= {f"time of {pair.replace('/', ' over ')}": value for pair, value in cell["time_ratio"].items()}
        named |= {f"time of kvr_s over bound: {name}": value for name, value in cell["over_bound"].items()}
        lines += [[name, *_where(cell), str(Interval(**value))] for name, value in named.items()]
    return lines


def noise(summary: Mapping[str, Any]) -> list[list[str]]:
    """Losses to a noisy neighbour."""
    lines = [["", "method", "flow on a link", "flow elsewhere", "link alone"]]
    for group, methods in summary["noise_loss"].items():
        for method, kinds in methods.items():
            shown = [_percent(kinds[kind]) if kind in kinds else "-" for kind in (LINK, ELSEWHERE, "link_alone")]
            lines.append([group, method, *shown])
    return lines


def choices(cells: Sequence[Cell]) -> list[list[str]]:
    """What `auto` chose, what it lost by it, and what was predicted of each candidate over what it took."""
    lines = [
        ["chose", "links", "KV heads", "ranks", "tokens", "regret [95%]", *(f"{name}: predicted" for name in PREDICTED)]
    ]
    for cell in cells:
        if "auto" in cell:
            predicted = cell["auto"]["predicted_over_measured"]
            shown = [f"{predicted[name]:.2f}" if name in predicted else "-" for name in PREDICTED]
            lines.append([cell["auto"]["chose"], *_where(cell), _percent(cell["auto"]["regret"]), *shown])
    return lines


def _where(cell: Cell) -> list[str]:
    return [cell["rate"], str(cell["kv_heads"]), str(cell["ranks"]), f"{cell['context']:,}"]


def _percent(value: Mapping[str, Any]) -> str:
    return f"{value['value']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"
