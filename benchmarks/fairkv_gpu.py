"""FairKV at the size of a large model without other GPUs: every tensor-parallel rank's decode work on one device."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from harness.launch import Rows, Summary, benchmark_alone
from harness.options import CONTIGUOUS, HEAD_METHODS, UNIFORM, Options

DRAWN = {"gain": ("nodp", "split4", "dp4"), "busy": ("contiguous", "nodp", "dp1", "dp2", "dp3", "dp4")}
FIGURES = (
    ("gain", "speedup", "Gain over contiguous heads (form of Figure 3)", "times"),
    ("busy", "busy", "Busy rate of ranks (form of Figures 4 and 5)", "busy rate"),
)
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 5e-3}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.choice("--device", ("cuda", "cpu"), "cuda", "cpu only tries the code, smaller")
    options.numbers("--tp", {"cuda": "4,8", "cpu": "2,4"}, "tensor-parallel degrees")
    options.numbers("--kept", {"cuda": "128,256,512,1024", "cpu": "64,128"}, "mean tokens that a KV head keeps")
    options.add("--batch", {"cuda": 60, "cpu": 6}, "sequences decoded together")
    options.add("--layers", {"cuda": 8, "cpu": 2}, "layers, each with budgets of its own")
    options.add("--repeats", {"cuda": 9, "cpu": 3}, "timed runs of every rank and layer")
    options.add("--threads", 1, "threads on the CPU")
    options.names("--methods", HEAD_METHODS, ",".join(HEAD_METHODS), "as for fairkv.py")
    # By default as in Llama 3 70B.
    shape: dict[str, Any] = {"group": {"cuda": 8, "cpu": 2}, "head_dim": {"cuda": 128, "cpu": 32}}
    options.kept_heads(**shape, dtype={"cuda": "bf16", "cpu": "fp32"})
    options.add("--hidden", {"cuda": 8192, "cpu": 256}, "hidden size")
    options.add("--intermediate", {"cuda": 28672, "cpu": 512}, "width of the MLP")
    arguments = options.parse(argv)
    if arguments.tp[-1] > arguments.kv_heads or arguments.intermediate % arguments.tp[-1]:
        options.error(
            f"--tp {arguments.tp[-1]}: allowed: up to --kv-heads {arguments.kv_heads}, and divisors of --intermediate "
            f"{arguments.intermediate}"
        )
    return arguments


def measure_case(arguments: argparse.Namespace, bench: Any, tp: int, kept: int) -> Rows:
    """The rows of one degree and budget; every method must compute what contiguous heads do."""
    from harness.head_division import make_division, skewed_budgets
    from harness.models import DTYPES as TYPES
    from harness.ragged_heads import HeadShape, TokenPool
    from harness.virtual_ranks import FeedForward, Projections, VirtualRanks, attention_seconds, check_same

    from megakv.costmodel.stopwatch import Pool

    shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, TYPES[arguments.dtype], bench.device)
    budgets = skewed_budgets(arguments.layers, arguments.kv_heads, kept, arguments.sigma, arguments.seed)
    pool = TokenPool(shape, max(kept, *map(max, budgets)), arguments.seed)
    size = {"ranks": tp, "batch": arguments.batch}
    expected = VirtualRanks(make_division(CONTIGUOUS, budgets, **size), pool, arguments.batch).outputs(0)
    weights, dense = Pool(shape.dtype, shape.device), dict[int, Any]()
    shared = bench.seconds(FeedForward(arguments.hidden, arguments.intermediate // tp, arguments.batch, weights))
    rows = []
    for name in arguments.methods:
        ranks = VirtualRanks(make_division(name, budgets, **size), pool, arguments.batch)
        facts = ranks.division.facts()
        if name != UNIFORM:
            facts["max_output_difference"] = check_same(name, ranks.outputs(0), expected, TOLERANCE[arguments.dtype])
        attention, held = attention_seconds([ranks], bench)[0], ranks.held_heads()
        for number in sorted(set(held.flat) - set(dense)):
            projections = Projections(shape, number, arguments.hidden, arguments.batch, weights)
            dense[number] = bench.seconds(projections) + shared
        whole = attention.copy()
        for number, seconds in dense.items():
            whole[:, held == number] += seconds[:, None]
        # Every layer is as slow as its slowest rank.
        slowest = attention.max(axis=2).sum(axis=1)
        busy = attention.sum(axis=1) / slowest[:, None]
        row = {"method": name, **size, "kept": kept, "seconds": slowest.tolist()}
        row |= {"whole_seconds": whole.max(axis=2).sum(axis=1).tolist()}
        row |= {"rank_seconds": attention.sum(axis=1).tolist()}
        rows.append(row | {"busy_rates": busy.mean(axis=0).tolist(), "busy": busy.T.tolist()} | facts)
    return rows


def run(arguments: argparse.Namespace) -> tuple[Rows, Summary, list[Any]]:
    import torch
    from harness.charts import groups
    from harness.fairkv_report import show_part, summarise
    from harness.publish import leaves
    from harness.virtual_ranks import Bench
    from tqdm import tqdm

    bench = Bench(torch.device(arguments.device), arguments.repeats)
    rows: Rows = []
    summary: Summary = {"attention": {}, "whole": {}}
    cases = [(tp, kept) for tp in arguments.tp for kept in arguments.kept]
    for tp, kept in (bar := tqdm(cases, unit="case")):
        bar.set_postfix_str(f"TP {tp}, {kept} kept")
        own = measure_case(arguments, bench, tp, kept)
        rows += own
        # How busy ranks are is known of attention alone.
        together = [{**row, "seconds": row["whole_seconds"]} for row in own]
        for row in together:
            del row["busy"]
        for part, some in (("attention", own), ("whole", together)):
            found = summary[part].setdefault(str(tp), {})[str(kept)] = summarise(some)
            title = "Attention" if part == "attention" else "Attention and matrix products"
            show_part(f"{title} on {tp} virtual ranks, {arguments.batch} x {kept} kept tokens", some, found)
    # The paper's Figures 3, 4 and 5 in form: gains, busy rates, and busy rates by copied heads.
    charts = []
    for tp, (name, kind, title, y_label) in itertools.product(arguments.tp, FIGURES):
        found = leaves(summary["attention"][str(tp)], "kept", "kind", "method")
        drawn = [row for row in found if row["kind"] == kind and row["method"] in DRAWN[name]]
        words = {"title": title, "x_label": "kept tokens per head", "y_label": y_label, "subtitle": f"TP {tp}"}
        charts.append(groups(f"{name}.tp{tp}", drawn, "kept", "method", **words))
    return rows, summary, charts


if __name__ == "__main__":
    sys.exit(benchmark_alone("fairkv_gpu", parse_arguments(), run))
