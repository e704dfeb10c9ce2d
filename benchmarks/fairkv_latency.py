"""Decode attention of a layer by batch and kept tokens, and the lines that FairKV draws through it (Section 3.2)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import median
from typing import Any

import psutil
import torch
from harness.heads.division import kept_heads, make_division, skewed_budgets
from harness.heads.kernels import Bench, HeadShape, RankLayer, TokenPool
from harness.launch import Found, Rows, benchmark_alone
from harness.models import DTYPES
from harness.options import Options, check_memory
from harness.publish import leaves, show
from scipy.stats import linregress

USABLE = 0.6  # Share of the free memory that the caches may take


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
    arguments = options.parse(argv)
    for name in ("batches", "kept"):
        if len(getattr(arguments, name)) < 2:
            options.error(f"--{name} {getattr(arguments, name)[0]}: allowed: two or more, a line goes through them")
    return arguments


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """L = slope x + intercept in seconds, by least squares, and the part of the variance that it explains."""
    found = linregress(xs, ys)
    explained = float(found.rvalue**2) if len(set(ys)) > 1 else 1.0
    return {"slope": float(found.slope), "intercept": float(found.intercept), "r_squared": explained}


def fit_lines(rows: Sequence[Mapping[str, Any]], group: str, x: str) -> dict[str, dict[str, float]]:
    """A line through the medians of each group (FairKV, Section 3.2)."""
    own = {key: [row for row in rows if row[group] == key] for key in sorted({row[group] for row in rows})}
    return {
        str(key): fit_line([row[x] for row in some], [median(row["seconds"]) for row in some])
        for key, some in own.items()
    }


def run(arguments: argparse.Namespace) -> Found:
    """One layer, every batch and budget in turn; heads keep unequal numbers of tokens."""
    device = torch.device(arguments.device)
    shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, DTYPES[arguments.dtype], device)
    # Cases are measured in turn, so the caches of all are there.
    free = psutil.virtual_memory().available if arguments.device == "cpu" else torch.cuda.mem_get_info()[0]
    needed = sum(arguments.batches) * sum(arguments.kept) * arguments.kv_heads * shape.token_bytes
    words = f"--batches up to {arguments.batches[-1]} with --kept up to {arguments.kept[-1]}"
    check_memory(needed, USABLE * free, words)
    spread = arguments.sigma, arguments.seed
    budgets = {kept: skewed_budgets(1, shape.kv_heads, kept, *spread) for kept in arguments.kept}
    pool = TokenPool(shape, max(budgets[arguments.kept[-1]][0]), arguments.seed)
    cases = [*product(arguments.batches, arguments.kept)]
    with torch.inference_mode():
        layers = [
            RankLayer(pool, make_division("contiguous", budgets[kept], ranks=1, batch=batch), 0, 0, batch)
            for batch, kept in cases
        ]
        seconds = Bench(device, arguments.repeats).by_turns([layer.attend for layer in layers]).T.tolist()
    rows: Rows = [
        # Over B C, the tokens that a KV head's rank reads: what both are where memory is the limit.
        {"part": "grid", "batch": batch, "kept": kept, "tokens": batch * kept, "seconds": own}
        for (batch, kept), own in zip(cases, seconds, strict=True)
    ]
    summary = {
        "over_batch": fit_lines(rows, "kept", "batch"),
        "over_budget": fit_lines(rows, "batch", "kept"),
        "over_tokens": fit_lines(rows, "part", "tokens")["grid"],
    }
    columns = "kept batch value.slope:us value.intercept:us value.r_squared"
    show(list(leaves(summary["over_batch"], "kept")), columns, "L = alpha B + beta")
    show(list(leaves(summary["over_budget"], "batch")), columns, "L = gamma C + delta")
    return rows, summary, []


if __name__ == "__main__":
    sys.exit(benchmark_alone("fairkv_latency", parse_arguments(), run))
