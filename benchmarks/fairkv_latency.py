"""Decode attention of a layer by batch and kept tokens, the lines that FairKV draws through it (Section 3.2), and what
the cost model predicts of steps over unequal heads, from a profile measured before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from harness.heads.names import kept_heads
from harness.launch import Found, Rows, Summary, benchmark_alone
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
    kept_heads(options, group=8)
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
    from harness.heads.division import make_division, skewed_budgets
    from harness.heads.ragged import RankLayer, TokenPool

    spread = arguments.sigma, arguments.seed
    budgets = {kept: skewed_budgets(1, shape.kv_heads, kept, *spread) for kept in arguments.kept}
    pool = TokenPool(shape, max(budgets[arguments.kept[-1]][0]), arguments.seed)
    cases = [(batch, kept) for batch in arguments.batches for kept in arguments.kept]
    with torch.inference_mode():
        layers = [
            RankLayer(pool, make_division("contiguous", budgets[kept], ranks=1, batch=batch), 0, 0, batch)
            for batch, kept in cases
        ]
        seconds = bench.by_turns([layer.attend for layer in layers]).T.tolist()
    return [
        {"part": "grid", "batch": batch, "kept": kept, "seconds": own}
        for (batch, kept), own in zip(cases, seconds, strict=True)
    ]


def measure_steps(arguments: argparse.Namespace, bench: Any, shape: Any) -> Rows:
    """Steps over unequal budgets, as slow in every layer as the slowest rank: the middle batch, the largest budget."""
    from harness.heads.division import make_division, skewed_budgets
    from harness.heads.ragged import TokenPool
    from harness.heads.virtual import VirtualRanks, attention_seconds
    from harness.profiles import keep, lone_profile

    from megakv.costmodel.head_times import HeadTimes
    from megakv.costmodel.shape import LayerShape, ModelShape

    batch, kept = arguments.batches[len(arguments.batches) // 2], arguments.kept[-1]
    budgets = skewed_budgets(arguments.layers, shape.kv_heads, kept, arguments.sigma, arguments.seed)
    pool, times = TokenPool(shape, max(map(max, budgets)), arguments.seed), None
    if arguments.profile_seconds:
        heads = shape.kv_heads * shape.group
        hidden = heads * shape.dim
        # A step is its attention: whatever else a layer has is not asked for.
        layers = (LayerShape(4 * hidden * hidden),) * arguments.layers
        sizes = heads, shape.kv_heads, shape.dim, shape.dim
        model = ModelShape(hidden, 2 * hidden, 1, *sizes, layers, 0, shape.dtype)
        profile = lone_profile(shape.device, model, arguments.profile_seconds)
        keep(profile, arguments, "1")
        times = HeadTimes(profile, model, tp_size=arguments.tp, batch=batch)
    # So many copies make all ranks equal; more would be the same.
    names = [name for name in STEPS if not name[-1].isdecimal() or int(name[-1]) < arguments.tp]
    divisions = [make_division(name, budgets, ranks=arguments.tp, batch=batch) for name in names]
    found = attention_seconds([VirtualRanks(division, pool, batch) for division in divisions], bench)
    rows = []
    for name, division, seconds in zip(names, divisions, found, strict=True):
        row = {"part": "step", "method": name, "ranks": arguments.tp, "batch": batch, "kept": kept}
        row |= {"seconds": seconds.max(axis=2).sum(axis=1).tolist(), "rank_seconds": seconds.tolist()}
        row |= {"loads": [[tokens / batch for tokens in layer] for layer in division.loads()]}
        row |= {"predicted_s": None if times is None else sum(map(times.attention, division.works(batch)))}
        rows.append(row | {"utilisation": division.facts()["utilisation"]})
    return rows


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """L = slope x + intercept in seconds, by least squares, and the part of the variance that it explains."""
    from scipy.stats import linregress

    found = linregress(xs, ys)
    explained = float(found.rvalue**2) if len(set(ys)) > 1 else 1.0
    return {"slope": float(found.slope), "intercept": float(found.intercept), "r_squared": explained}


def fit_lines(rows: Sequence[Mapping[str, Any]], group: str, x: str) -> dict[str, dict[str, float]]:
    """A line through the medians of each group (FairKV, Section 3.2)."""
    from statistics import median

    own = {key: [row for row in rows if row[group] == key] for key in sorted({row[group] for row in rows})}
    return {
        str(key): fit_line([row[x] for row in some], [median(row["seconds"]) for row in some])
        for key, some in own.items()
    }


def summarise(rows: Rows) -> Summary:
    """The lines through the medians of the grid, and how far the steps are from what was predicted."""
    import numpy as np

    from megakv.costmodel.stopwatch import lower_decile

    # Over B C, the tokens that a KV head's rank reads: what both are where memory is the limit.
    grid = [{**row, "tokens": row["batch"] * row["kept"]} for row in rows if row["part"] == "grid"]
    found: Summary = {
        "over_batch": fit_lines(grid, "kept", "batch"),
        "over_budget": fit_lines(grid, "batch", "kept"),
        "over_tokens": fit_lines(grid, "part", "tokens")["grid"],
        "predicted": {},
    }
    for row in rows[len(grid) :]:
        if (predicted := row["predicted_s"]) is None:
            continue
        # Ranks run one after the other here: the slowest of each repetition would be the one that was disturbed. On a
        # busy machine the lower decile, which profiles are made of, says more than the median.
        measured, undisturbed = (
            float(np.apply_along_axis(typical, 0, row["rank_seconds"]).max(axis=1).sum())
            for typical in (np.median, lower_decile)
        )
        entry = {"measured_s": measured, "predicted_s": predicted, "off": predicted / measured - 1}
        entry |= {"undisturbed_s": undisturbed, "undisturbed_off": predicted / undisturbed - 1}
        found["predicted"][row["method"]] = entry
    return found


def run(arguments: argparse.Namespace) -> Found:
    import torch
    from harness.heads.ragged import HeadShape
    from harness.heads.virtual import Bench
    from harness.models import DTYPES
    from harness.publish import leaves, show

    device = torch.device(arguments.device)
    shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, DTYPES[arguments.dtype], device)
    # Cases are measured in turn, so the caches of all are there; on the CPU steps' of all layers and methods, too.
    on_cpu = arguments.device == "cpu"
    free = psutil.virtual_memory().available if on_cpu else torch.cuda.mem_get_info()[0]
    middle = arguments.batches[len(arguments.batches) // 2]
    steps = len(STEPS) * arguments.layers * middle * arguments.kept[-1] if on_cpu else 0
    needed = max(sum(arguments.batches) * sum(arguments.kept), steps) * arguments.kv_heads * shape.token_bytes
    words = f"--batches up to {arguments.batches[-1]} with --kept up to {arguments.kept[-1]}"
    check_memory(needed, USABLE * free, f"{words}, --layers {arguments.layers}")
    bench = Bench(device, arguments.repeats)
    rows = measure_grid(arguments, bench, shape) + measure_steps(arguments, bench, shape)
    summary, columns = summarise(rows), "kept batch value.slope:us value.intercept:us value.r_squared"
    show(list(leaves(summary["over_batch"], "kept")), columns, "L = alpha B + beta")
    show(list(leaves(summary["over_budget"], "batch")), columns, "L = gamma C + delta")
    said = [{**row, **summary["predicted"].get(row["method"], {})} for row in rows if row["part"] == "step"]
    columns = (
        "method ranks batch kept utilisation:% measured_s:ms undisturbed_s:ms predicted_s:ms off:% undisturbed_off:%"
    )
    show(said, columns, "A step's attention by the slowest rank of every layer")
    return rows, summary, []


if __name__ == "__main__":
    sys.exit(benchmark_alone("fairkv_latency", parse_arguments(), run))
