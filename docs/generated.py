"""The parts of the documentation that are computed: ``python docs/generated.py`` writes them anew.

Two marks, invisible where Markdown is rendered, say what is computed:

- ``<!-- generated: NAME -->`` ... ``<!-- end -->`` holds the output of one of `TABLES`.
- ``1.58<!-- figure: hosts.json summary.limited_over_unlimited.1gbit.tp.value -->`` is a number of a results file, of
  benchmarks/results, with as many decimals as are written. A name with a slash is a path from the repository's root.
  The path goes through keys and indices; ``method=pass_kv`` picks a list's entry by a key, ``*`` takes all entries that
  have what follows, and ``median``, ``max``, ``min`` and ``count`` end it; keys may have dots themselves. With ``%``
  behind the number it is 100 times the file's, with ``MiB``, ``ms``, ``GB/s`` or ``TFLOP/s`` in that unit.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import PreTrainedConfig  # noqa: E402

from docs.reference import (  # noqa: E402
    attention_table,
    commands_table,
    compression_methods_table,
    laws_table,
    offload_table,
    refused_table,
    settings_table,
    weight_formats_table,
)
from megakv.costmodel.shape import ModelShape  # noqa: E402
from megakv.engine.loading import empty_model  # noqa: E402
from megakv.injection.policy import policy_for  # noqa: E402
from megakv.weights.placement import contiguous_head_map, head_counts, plan_placement  # noqa: E402
from recipes.common.catalogue import load_recipe, names  # noqa: E402
from tests.families import FAMILIES  # noqa: E402

FIGURE = re.compile(
    r"(?P<shown>\d[\d,]*(?:\.\d+)?)(?P<unit> ?(?:%|MiB|ms|GB/s|TFLOP/s))?<!-- figure: (?P<file>\S+) (?P<path>.+?) -->"
)
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
UNITS = {"": 1.0, "%": 100.0, "MiB": 2.0**-20, "ms": 1e3, "GB/s": 1e-9, "TFLOP/s": 1e-12}
ENDS: dict[str, Callable[[list[float]], float]] = {
    "median": statistics.median,
    "max": max,
    "min": min,
    "count": len,
}


def refusal_of(config: PreTrainedConfig) -> str | None:
    """Why a model cannot be split over two tensor-parallel ranks; None if it can."""
    try:
        plan_placement(empty_model(config, torch.float32), contiguous_head_map(*head_counts(config), 2), 0)
    except ValueError as error:
        return str(error).partition(": ")[2].rpartition("; use ")[0]
    return None


def families_table() -> str:
    """A row per model type of tests/families.py: the tested forms, and whether tensor parallelism can split it."""
    forms: dict[str, list[str]] = {}
    refusals: dict[str, str | None] = {}
    configs: dict[str, PreTrainedConfig] = {}
    for family in FAMILIES.values():
        config = family()
        kind = config.model_type
        forms.setdefault(kind, []).append((family.__doc__ or "").strip().rstrip("."))
        refusals[kind], configs[kind] = refusals.get(kind) or refusal_of(config), config
    lines = ["| `model_type` | forms that are tested | CP | TP | attention |", "|---|---|:-:|---|---|"]
    for kind, texts in forms.items():
        tensor_parallel = "yes" if refusals[kind] is None else f"refused: {refusals[kind]}"
        entry = "interface" if policy_for(kind).substitute is None else "substituted"
        entry = "latents" if ModelShape.from_config(configs[kind]).latent else entry
        lines.append(f"| `{kind}` | {'<br>'.join(texts)} | yes | {tensor_parallel} | {entry} |")
    return "\n".join(lines) + "\n"


def accuracy_table() -> str:
    """Exact answers of the passkey model by length."""
    results = json.loads((ROOT / "recipes" / "passkey" / "results" / "accuracy.json").read_text())
    totals: dict[int, tuple[int, int]] = {}
    for row in results["prompts"]:
        prompts, exact = totals.get(row["length"], (0, 0))
        totals[row["length"]] = prompts + row["prompts"], exact + row["exact"]
    lines = [
        f"| tokens | {' | '.join(f'{length:,}' for length in totals)} |",
        f"|---|{'---:|' * len(totals)}",
        f"| prompts | {' | '.join(str(prompts) for prompts, _ in totals.values())} |",
        f"| exact answers, % | {' | '.join(f'{100 * exact / prompts:.1f}' for prompts, exact in totals.values())} |",
    ]
    return "\n".join(lines) + "\n"


METHODS = {
    "single": "plain transformers, one process of its own on every rank",
    "tp": "DeepSpeed AutoTP, its shared-memory sums",
    "pass_kv": "MegaKV, ring pass-KV",
    "pass_q": "MegaKV, ring pass-Q",
    "all_gather": "MegaKV, all-gather",
    "tsp": "MegaKV, TSP, the whole rectangle under a mask",
    "tsp_causal": "MegaKV, TSP that skips what is hidden",
    "kvr_e": "MegaKV, KV-Runahead, even parts",
    "kvr_s": "MegaKV, KV-Runahead, searched parts",
    "kvr_p": "MegaKV, KV-Runahead, interpolated parts",
    "one_rank": "MegaKV, everything on one rank",
    "auto": "MegaKV, what `auto` chooses",
}


def prefill_table() -> str:
    """Times, traffic and memory of benchmarks/results/prefill.json."""
    results = json.loads((ROOT / "benchmarks" / "results" / "prefill.json").read_text())
    lines = [
        "| | seconds, median | times pass-KV's time | MiB sent per rank | MiB of activations and KV per rank |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in results["rows"]:
        (cell,) = results["summary"]["speedup"].values()
        faster = cell["pass_kv"].get(row["method"])
        ratio = "" if faster is None else f"{faster['value']:.2f} ({faster['low']:.2f} to {faster['high']:.2f})"
        sent = max(sum(operations.values()) for operations in row["bytes_sent"]) / 2**20
        cells = [METHODS[row["method"]], f"{statistics.median(row['seconds']):.1f}", ratio, f"{sent:,.0f}"]
        lines.append(f"| {' | '.join(cells)} | {max(row['working_bytes']) / 2**20:,.0f} |")
    return "\n".join(lines) + "\n"


def runahead_table() -> str:
    """Times and traffic of the longest prompt on most ranks over free links in benchmarks/results/runahead.json."""
    results = json.loads((ROOT / "benchmarks" / "results" / "runahead.json").read_text())
    free = [cell for cell in results["summary"]["cells"].values() if cell["rate"] == "free"]
    cell = max(free, key=lambda cell: (cell["ranks"], cell["context"], cell["kv_heads"]))
    lines = ["| | seconds, median | times KVR-S's time | MiB sent by all ranks |", "|---|---:|---:|---:|"]
    for row in results["rows"]:
        if any(row[key] != cell[key] for key in ("rate", "ranks", "context", "kv_heads")) or row["noise"] != "quiet":
            continue
        faster = cell["speedup"].get(f"kvr_s/{row['method']}")
        ratio = "" if faster is None else f"{faster['value']:.2f} ({faster['low']:.2f} to {faster['high']:.2f})"
        sent = sum(sum(operations.values()) for operations in row["bytes_sent"]) / 2**20
        cells = [METHODS[row["method"]], f"{statistics.median(row['seconds']):.1f}", ratio, f"{sent:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ruler_table() -> str:
    """Scores by method and budget at the shortest length of benchmarks/results/accuracy.json."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "accuracy.json").read_text())["rows"]
    own = [row for row in rows if row["context"] == min(each["context"] for each in rows)]
    tasks = list(dict.fromkeys(row["task"] for row in own))
    lines = [
        f"| tokens of a KV head | method | {' | '.join(tasks)} | 95% interval |",
        f"|---:|---|{'---:|' * len(tasks)}---:|",
    ]
    for method, budget in dict.fromkeys((row["method"], row["budget"]) for row in own):
        cells = {row["task"]: row["score"] for row in own if (row["method"], row["budget"]) == (method, budget)}
        shown = [f"{100 * cells[task]['value']:.0f}" if task in cells else "-" for task in tasks]
        total = cells[tasks[-1]]
        reach = f"{100 * total['low']:.0f} to {100 * total['high']:.0f}"
        lines.append(f"| {'all' if budget is None else f'{budget:,}'} | `{method}` | {' | '.join(shown)} | {reach} |")
    return "\n".join(lines) + "\n"


def rivals_table() -> str:
    """TTFT, TTIT and memory at the longest prompt in benchmarks/results/rivals.json, and where MegaKV loses."""
    results = json.loads((ROOT / "benchmarks" / "results" / "rivals.json").read_text())
    longest = max(row["context"] for row in results["rows"])
    lines = ["| | weights | TTFT, s | TTIT, ms | peak memory, MiB |", "|---|---|---:|---:|---:|"]
    for row in results["rows"]:
        if row["context"] == longest:
            ttft, ttit = statistics.median(row["seconds"]), 1e3 * statistics.median(row["ttit_s"])
            cells = [
                row["runs"],
                row["weights"],
                f"{ttft:.1f}",
                f"{ttit:.0f}",
                f"{max(row['peak_bytes']) / 2**20:,.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    absent = [f"- {name}: not measured: {reason}" for name, reason in results["summary"]["not_run"].items()]
    loses = [f"- {sentence}" for sentence in results["summary"]["loses"]] or ["- nowhere"]
    return "\n".join([*lines, "", *absent, *([""] if absent else []), "Where MegaKV loses:", "", *loses]) + "\n"


def recipes_table() -> str:
    """A row per recipe of a model from the papers."""
    lines = ["| recipe | model | configs |", "|---|---|---|"]
    for name in names():
        recipe = load_recipe(name)
        configs = ", ".join(f"[{run.config}](../recipes/{name}/{run.config})" for run in recipe.runs)
        lines.append(f"| [`recipes/{name}`](../recipes/{name}/README.md) | {recipe.title} | {configs} |")
    return "\n".join(lines) + "\n"


def compression_table() -> str:
    """What compression costs the pass-key model, as its experiment wrote it."""
    return (ROOT / "recipes" / "passkey" / "results" / "compression.md").read_text().rstrip() + "\n"


def balance_table() -> str:
    """How even mapped heads are on documents unlike the profile's, as its experiment wrote it."""
    return (ROOT / "recipes" / "passkey" / "results" / "balance.md").read_text().rstrip() + "\n"


def predictions_table() -> str:
    """Errors of the cost model in the rows of each file of benchmarks/results, of MegaKV's own methods."""
    lines = ["| results | times | median error | mean direction | largest |", "|---|---:|---:|---:|---:|"]
    errors: dict[str, list[float]] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            if row.get("method", "tp").startswith(("single", "in_place", "tp")):
                continue
            # A scheduler's own cost model, not its correction by earlier steps.
            predicted = row.get("cost_model_s", row.get("predicted_s"))
            for samples, seconds in (("seconds", predicted), ("ttit_seconds", row.get("predicted_ttit_s"))):
                if isinstance(seconds, float):
                    errors.setdefault(path.name, []).append(seconds / statistics.median(row[samples]) - 1)
    errors["all"] = [error for several in errors.values() for error in several]
    errors["all but `offload*`"] = [
        error for name, several in errors.items() if not name.startswith(("offload", "all")) for error in several
    ]
    for name, several in errors.items():
        middle, signed = statistics.median(map(abs, several)), statistics.median(several)
        shown = f"`{name}`" if name.endswith(".json") else name
        lines.append(f"| {shown} | {len(several)} | {middle:.1%} | {signed:+.1%} | {max(map(abs, several)):.1%} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "refused": refused_table,
    "weight_formats": weight_formats_table,
    "laws": laws_table,
    "attention": attention_table,
    "offload": offload_table,
    "compression_methods": compression_methods_table,
    "commands": commands_table,
    "families": families_table,
    "accuracy": accuracy_table,
    "prefill": prefill_table,
    "runahead": runahead_table,
    "ruler": ruler_table,
    "rivals": rivals_table,
    "recipes": recipes_table,
    "predictions": predictions_table,
    "compression": compression_table,
    "balance": balance_table,
}


def figure(file: str, path: str) -> float:
    """A number of a results file.

    Raises
    ------
    ValueError
        If the path leads to no number.
    """
    results = json.loads((ROOT / file if "/" in file else ROOT / "benchmarks" / "results" / file).read_text())
    steps = path.split(".")
    found = _entries(results, steps[:-1]) if steps[-1] in ENDS else []
    numbers = found if "*" in steps else next(iter(found), None)
    if isinstance(numbers, list) and numbers:
        value = ENDS[steps[-1]](numbers)
    else:
        value, *more = _entries(results, steps)
        if more:
            raise ValueError(f"{file} {path} is {1 + len(more)} numbers: end it with one of {', '.join(ENDS)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{file} {path} is {value!r}, no number")
    return float(value)


def _entries(inside: Any, steps: list[str]) -> list[Any]:
    """What a path leads to; several where it has a ``*``."""
    if not steps:
        return [inside]
    step, *rest = steps
    if step == "*":
        found: list[Any] = []
        for entry in inside.values() if isinstance(inside, dict) else inside:
            if not rest or isinstance(entry, dict | list):
                with contextlib.suppress(KeyError):
                    found += _entries(entry, rest)
        return found
    if isinstance(inside, list):
        key, picks, value = step.partition("=")
        chosen = next(entry for entry in inside if str(entry[key]) == value) if picks else inside[int(step)]
        return _entries(chosen, rest)
    while step not in inside and rest:
        step += f".{rest.pop(0)}"
    return _entries(inside[step], rest)


def _quoted(match: re.Match[str]) -> str:
    shown, unit = match["shown"], match["unit"] or ""
    decimals = len(shown.partition(".")[2])
    value = figure(match["file"], match["path"]) * UNITS[unit.strip()]
    text = f"{value:,.{decimals}f}" if "," in shown or value >= 10_000 else f"{value:.{decimals}f}"
    return f"{text}{unit}<!-- figure: {match['file']} {match['path']} -->"


def refresh(text: str) -> str:
    """A document with its computed parts as they should be."""
    text = BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)
    return FIGURE.sub(_quoted, text)


def documents() -> list[Path]:
    """All Markdown files that are checked and refreshed."""
    own = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
    return [*own, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "recipes").glob("*/*.md"))]


def main() -> None:
    """Write every document anew."""
    for path in documents():
        path.write_text(refresh(path.read_text()))


if __name__ == "__main__":
    main()
