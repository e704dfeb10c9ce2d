"""Decode attention of a layer by batch and kept tokens, the lines that FairKV draws through it (Section 3.2), and what
the cost model predicts of steps over unequal heads, from a profile measured before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from harness.launch import Rows, Summary, benchmark_alone
from harness.options import Options, check_memory

USABLE = 0.6  # Share of the free memory that the caches may take
STEPS = ("contiguous", "nodp", "split1", "split3")
"""Whose step is predicted, as in fairkv.py; those that the ranks allow."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.choice("--device", ("cpu", "cuda"), "cpu", "where to measure")
    options.numbers("--batches", {"cpu": "1,2,4,8,16", "cuda": "32,64,128,256,512"}, "sequences decoded together")
    options.numbers("--kept", "128,256,512,1024", "mean tokens that a KV head keeps, the paper's")
    options.add("--repeats", 15, "rounds of all cases")
    options.add("--threads", 1, "threads on the CPU")
    # By default as in Llama 3 70B.
    options.kept_heads(group=8)
    options.add("--tp", 4, "ranks of the step that is predicted")
    options.add("--layers", 8, "its layers")
    options.profile(20.0)
    arguments = options.parse(argv)
    for name in ("batches", "kept"):
        if len(getattr(arguments, name)) < 2:
            options.error(f"--{name} {getattr(arguments, name)[0]}: allowed: two or more, a line goes through them")
    if arguments.tp > arguments.kv_heads:
        options.error(f"--tp {arguments.tp}: allowed: up to --kv-heads {arguments.kv_heads}, a head for each rank")
    return arguments


def measure_grid(arguments: argparse.Namespace, bench: Any, shape: Any) -> Rows:
    """One layer, every batch and budget in turn; heads keep unequal numbers of tokens, as the steps' heads do."""
    import torch
    from harness.head_division import make_division, skewed_budgets
    from harness.ragged_heads import RankLayer, TokenPool

    spread = arguments.sigma, arguments.seed
    budgets = {kept: skewed_budgets(1, shape.kv_heads, kept, *spread) for kept in arguments.kept}
    pool = TokenPool(shape, max(budgets[arguments.kept[-1]][0]), arguments.seed)
    cases = [(batch, kept) for batch in arguments.batches for kept in arguments.kept]
    with torch.inference_mode():
        layers = [
            RankLayer(pool, make_division("contiguous", budgets[kept], ranks=1, batch=batch), 0, 0, batch)
            for batch, kept in cases
        ]
        seconds = bench.by_turns([layer.attend for layer in layers])
    return [
        {"part": "grid", "batch": batch, "kept": kept, "seconds": seconds[:, number].tolist()}
        for number, (batch, kept) in enumerate(cases)
    ]


def measured_times(arguments: argparse.Namespace, shape: Any, batch: int) -> Any:
    """The cost model of the steps' heads, from a profile measured now; None without the time to."""
    from harness.profiles import lone_profile, profiles_of

    from megakv.costmodel.head_times import HeadTimes
    from megakv.costmodel.shape import LayerShape, ModelShape

    if not arguments.profile_seconds:
        return None
    heads, dim = shape.kv_heads * shape.group, shape.dim
    hidden = heads * dim
    # A step is its attention: whatever else a layer has is not asked for.
    layers = (LayerShape(4 * hidden * hidden),) * arguments.layers
    model = ModelShape(hidden, 2 * hidden, 1, heads, shape.kv_heads, dim, dim, layers, 0, shape.dtype)
    profile = lone_profile(shape.device, model, arguments.profile_seconds)
    if arguments.json:
        profile.save(profiles_of(Path(arguments.json)) / "1.json")
    return HeadTimes(profile, model, tp_size=arguments.tp, batch=batch)


def measure_steps(arguments: argparse.Namespace, bench: Any, shape: Any) -> Rows:
    """Steps over unequal budgets, as slow in every layer as the slowest rank: the middle batch, the largest budget."""
    from harness.head_division import make_division, skewed_budgets
    from harness.ragged_heads import TokenPool
    from harness.virtual_ranks import VirtualRanks, attention_seconds

    batch, kept = arguments.batches[len(arguments.batches) // 2], arguments.kept[-1]
    budgets = skewed_budgets(arguments.layers, shape.kv_heads, kept, arguments.sigma, arguments.seed)
    pool = TokenPool(shape, max(map(max, budgets)), arguments.seed)
    rows, times = [], measured_times(arguments, shape, batch)
    # So many copies make all ranks equal; more would be the same.
    names = [name for name in STEPS if not name[-1].isdecimal() or int(name[-1]) < arguments.tp]
    divisions = [make_division(name, budgets, ranks=arguments.tp, batch=batch) for name in names]
    found = attention_seconds([VirtualRanks(division, pool, batch) for division in divisions], bench)
    for name, division, seconds in zip(names, divisions, found, strict=True):
        row = {"part": "step", "method": name, "ranks": arguments.tp, "batch": batch, "kept": kept}
        row |= {"seconds": seconds.max(axis=2).sum(axis=1).tolist(), "rank_seconds": seconds.tolist()}
        row |= {"loads": [[tokens / batch for tokens in layer] for layer in division.loads()]}
        row |= {"predicted_s": None if times is None else sum(map(times.attention, division.works(batch)))}
        rows.append(row | {"utilisation": division.facts()["utilisation"]})
    return rows


def summarise(rows: Rows) -> Summary:
    """The lines through the medians of the grid, and how far the steps are from what was predicted."""
    import numpy as np
    from harness.latency_lines import LatencySample, fit_latency
    from harness.statistics import median

    from megakv.costmodel.stopwatch import lower_decile

    grid = [row for row in rows if row["part"] == "grid"]
    model = fit_latency([LatencySample(row["batch"], row["kept"], median(row["seconds"]).value) for row in grid])
    found: Summary = {
        "over_batch": {str(kept): asdict(line) for kept, line in model.over_batch.items()},
        "over_budget": {str(batch): asdict(line) for batch, line in model.over_budget.items()},
        "over_tokens": asdict(model.over_tokens),
        "predicted": {},
    }
    for row in rows[len(grid) :]:
        if (predicted := row["predicted_s"]) is None:
            continue
        # Ranks run one after the other here: the slowest of each repetition would be the one that was disturbed.
        measured, undisturbed = (
            float(np.apply_along_axis(typical, 0, row["rank_seconds"]).max(axis=1).sum())
            for typical in (np.median, lower_decile)
        )
        entry = {"measured_s": measured, "predicted_s": predicted, "off": predicted / measured - 1}
        # On a busy machine: what profiles are made of, too.
        entry |= {"undisturbed_s": undisturbed, "undisturbed_off": predicted / undisturbed - 1}
        found["predicted"][row["method"]] = entry
    return found


def charts(rows: Rows, summary: Mapping[str, Any], subtitle: str) -> list[Any]:
    """The paper's Figure 1: time by batch, a line for each budget, and by budget, a line for each batch."""
    from harness.charts import COLOURS, lines

    grid, made = [row for row in rows if row["part"] == "grid"], []
    for name, x, group, axis in (
        ("over_batch", "batch", "kept", "sequences decoded together"),
        ("over_budget", "kept", "batch", "tokens that each KV head keeps"),
    ):
        fits = summary[name]
        points = [{"x": row[x], "of": str(row[group]), "y": row["seconds"]} for row in grid]
        measured = [{**point, "line": f"{group} {point['of']}"} for point in points]
        # Matplotlib leaves out of the legend what begins with a line.
        fitted = [
            {**point, "line": f"_{point['of']}", "y": fit["intercept"] + fit["slope"] * point["x"]}
            for point in points
            for fit in (fits[point["of"]],)
        ]

        def looks(row: Mapping[str, Any], order: Sequence[str] = tuple(fits)) -> dict[str, str]:
            colour = COLOURS[order.index(row["of"]) % len(COLOURS)]
            form = {"linestyle": "--", "marker": ""} if row["line"].startswith("_") else {"linestyle": "none"}
            return {**form, "color": colour}

        labels = {"title": f"Decode attention of a layer by {x}", "subtitle": subtitle, "x_label": axis}
        words = {"looks": looks, "y_label": "milliseconds", **labels}
        made.append(lines(x, measured + fitted, "x", "y", "line", scale=1e3, log_x=False, **words))
    return made


def run(arguments: argparse.Namespace) -> tuple[Rows, Summary, list[Any]]:
    import torch
    from harness.models import DTYPES as TYPES
    from harness.publish import leaves, show
    from harness.ragged_heads import HeadShape
    from harness.virtual_ranks import Bench

    device = torch.device(arguments.device)
    shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, TYPES[arguments.dtype], device)
    # Cases are measured in turn, so the caches of all are there; on the CPU steps' of all layers and methods, too.
    on_cpu = arguments.device == "cpu"
    free = psutil.virtual_memory().available if on_cpu else torch.cuda.mem_get_info()[0]
    middle = arguments.batches[len(arguments.batches) // 2]
    steps = len(STEPS) * arguments.layers * middle * arguments.kept[-1] if on_cpu else 0
    needed = max(sum(arguments.batches) * sum(arguments.kept), steps) * arguments.kv_heads * shape.token_bytes
    words = (
        f"--batches up to {arguments.batches[-1]} with --kept up to {arguments.kept[-1]}, --layers {arguments.layers}"
    )
    check_memory(needed, USABLE * free, words)
    bench = Bench(device, arguments.repeats)
    rows = measure_grid(arguments, bench, shape) + measure_steps(arguments, bench, shape)
    summary = summarise(rows)
    lines_of = {
        "L = alpha B + beta": leaves(summary["over_batch"], "kept"),
        "L = gamma C + delta": leaves(summary["over_budget"], "batch"),
        "For all B and C": [{"value": summary["over_tokens"]}],
    }
    for title, found in lines_of.items():
        show(list(found), "kept batch value.slope:us value.intercept:us value.r_squared", title)
    steps = [{**row, **summary["predicted"].get(row["method"], {})} for row in rows if row["part"] == "step"]
    columns = (
        "method ranks batch kept utilisation:% measured_s:ms undisturbed_s:ms predicted_s:ms off:% undisturbed_off:%"
    )
    show(steps, columns, "A step's attention by the slowest rank of every layer")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {arguments.threads} thread(s)"
    heads = f"{arguments.kv_heads} KV heads of {arguments.group} query heads"
    subtitle = f"{name}, {heads}, {arguments.dtype}; dashed: fitted"
    return rows, summary, charts(rows, summary, subtitle)


if __name__ == "__main__":
    sys.exit(benchmark_alone("fairkv_latency", parse_arguments(), run, on_cpu="--device cpu measures the CPU"))
