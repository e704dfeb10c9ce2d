"""FairKV at the size of a large model without other GPUs: every tensor-parallel rank's decode work on one device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from harness.launch import Rows, run_alone
from harness.options import DTYPES, Options

METHODS = ("uniform", "contiguous", "nodp", *(f"{kind}{number}" for kind in ("dp", "split") for number in (1, 2, 3, 4)))
DRAWN = ("nodp", "split4", "dp4")
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
    options.names("--methods", METHODS, ",".join(METHODS), "as for fairkv.py")
    options.add("--sigma", 0.8, "of the heads' log-normal budgets")
    options.add("--seed", 222, "of the budgets", least=0)
    options.add("--kv-heads", 8, "KV heads of a layer")
    options.add("--group", {"cuda": 8, "cpu": 2}, "query heads to a KV head; Llama 3 70B")
    options.add("--head-dim", {"cuda": 128, "cpu": 32}, "head dimension")
    options.add("--hidden", {"cuda": 8192, "cpu": 256}, "hidden size")
    options.add("--intermediate", {"cuda": 28672, "cpu": 512}, "width of the MLP")
    options.choice("--dtype", DTYPES, {"cuda": "bf16", "cpu": "fp32"}, "of queries, keys, values")
    arguments = options.parse(argv)
    if arguments.tp[-1] > arguments.kv_heads or arguments.intermediate % arguments.tp[-1]:
        options.error(
            f"--tp {arguments.tp[-1]}: allowed: up to --kv-heads {arguments.kv_heads}, and divisors of --intermediate "
            f"{arguments.intermediate}"
        )
    return arguments


def measure_cell(arguments: argparse.Namespace, bench: Any, tp: int, kept: int) -> Rows:
    """The rows of one degree and budget; every method must compute what contiguous heads do."""
    from harness.fairkv_report import load_facts
    from harness.head_division import UNIFORM, make_division, skewed_budgets
    from harness.models import DTYPES as TYPES
    from harness.ragged_heads import HeadShape, TokenPool
    from harness.virtual_ranks import DenseLayer, VirtualRanks, check_same

    shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, TYPES[arguments.dtype], bench.device)
    budgets = skewed_budgets(arguments.layers, arguments.kv_heads, kept, arguments.sigma, arguments.seed)
    pool = TokenPool(shape, max(kept, *map(max, budgets)), arguments.seed)
    size = {"ranks": tp, "batch": arguments.batch}
    expected = VirtualRanks(make_division("contiguous", budgets, **size), pool, arguments.batch).outputs(0)
    dense: dict[int, Any] = {}
    rows = []
    for name in arguments.methods:
        ranks = VirtualRanks(make_division(name, budgets, **size), pool, arguments.batch)
        facts = load_facts(ranks.division)
        if name != UNIFORM:
            facts["max_output_difference"] = check_same(name, ranks.outputs(0), expected, TOLERANCE[arguments.dtype])
        attention, held = ranks.attention_seconds(bench), ranks.held_heads()
        for number in sorted(set(held.flat) - set(dense)):
            layer = DenseLayer(shape, number, arguments.hidden, arguments.intermediate // tp, arguments.batch)
            dense[number] = bench.seconds(layer)
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


def whole(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of attention and matrix products together; how busy ranks are is known of attention alone."""
    return {**{name: value for name, value in row.items() if name != "busy"}, "seconds": row["whole_seconds"]}


def plot(figure: Any, cells: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """The paper's Figures 3, 4 and 5 in form: gains, busy rates, and busy rates by copied heads."""
    copied = [f"dp{number}" for number in range(1, 5)]
    figure.set_layout_engine("constrained")
    grid = figure.subplots(len(cells), 3, squeeze=False)
    for row, (degree, budgets) in zip(grid, cells.items(), strict=True):
        found = list(budgets.values())
        gains = {name: [cell["speedup"].get(name, {}).get("value") for cell in found] for name in DRAWN}
        busy = {name: [cell["busy"].get(name) for cell in found] for name in ("contiguous", "nodp", DRAWN[-1])}
        by_copies = {kept: [cell["busy"].get(name) for name in copied] for kept, cell in budgets.items()}
        for axes, lines, places, title, label in (
            (row[0], gains, budgets, "gain over contiguous heads (Fig. 3)", "kept tokens per head"),
            (row[1], busy, budgets, "busy rate (Fig. 4)", "kept tokens per head"),
            (row[2], by_copies, copied, "busy rate by CH (Fig. 5)", "copied heads; a line per budget"),
        ):
            for name, values in lines.items():
                known = [(place, value) for place, value in enumerate(values) if value is not None]
                if known:
                    axes.plot(*zip(*known, strict=True), marker="o", ms=4, lw=1.4, label=name)
            axes.set_xticks(range(len(places)), [place.removeprefix("dp") for place in places], fontsize=8)
            axes.set_xlabel(label, fontsize=8)
            axes.set_title(f"TP {degree}: {title}", fontsize=9)
            axes.legend(fontsize=7, frameon=False)


def run(arguments: argparse.Namespace) -> None:
    """Measure every budget at every degree, and report."""
    import torch
    from harness.charts import Chart
    from harness.fairkv_report import show, summarise
    from harness.publish import describe_machine, publish
    from harness.virtual_ranks import Bench
    from tqdm import tqdm

    machine = describe_machine()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    bench = Bench(torch.device(arguments.device), arguments.repeats)
    rows: Rows = []
    summary: dict[str, Any] = {"attention": {}, "whole": {}}
    cells = [(tp, kept) for tp in arguments.tp for kept in arguments.kept]
    for tp, kept in (bar := tqdm(cells, unit="cell")):
        bar.set_postfix_str(f"TP {tp}, {kept} kept")
        own = measure_cell(arguments, bench, tp, kept)
        rows += own
        for part, some in (("attention", own), ("whole", [whole(row) for row in own])):
            found = summary[part].setdefault(str(tp), {})[str(kept)] = summarise(some)
            title = "Attention" if part == "attention" else "Attention and matrix products"
            show(f"{title} on {tp} virtual ranks, {arguments.batch} x {kept} kept tokens", some, found)
    cells_of = summary["attention"]
    chart = Chart("", lambda figure: plot(figure, cells_of), (12.0, 3.2 * len(cells_of)))
    publish(arguments, "fairkv_gpu", machine, rows, summary, [chart])


if __name__ == "__main__":
    sys.exit(run_alone(parse_arguments(), run))
