"""FairKV at the size of a large model without other GPUs: every tensor-parallel rank's decode work on one device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from harness.arguments import DTYPES, check_positive, method_names, whole_numbers

METHODS = ("uniform", "contiguous", "nodp", *(f"{kind}{number}" for kind in ("dp", "split") for number in (1, 2, 3, 4)))
DRAWN = ("nodp", "split4", "dp4")
DEFAULTS = {
    "cuda": {"tp": "4,8", "kept": "128,256,512,1024", "batch": 60, "layers": 8, "repeats": 9},
    "cpu": {"tp": "2,4", "kept": "64,128", "batch": 6, "layers": 2, "repeats": 3},
}
SHAPES = {
    "cuda": {"group": 8, "head_dim": 128, "hidden": 8192, "intermediate": 28672, "dtype": "bf16"},
    "cpu": {"group": 2, "head_dim": 32, "hidden": 256, "intermediate": 512, "dtype": "fp32"},
}
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 5e-3}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends with a message if it is impossible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results here, and a chart (PNG) beside it")
    parser.add_argument("--device", choices=tuple(DEFAULTS), default="cuda", help="cpu only tries the code, smaller")
    parser.add_argument("--tp", help="tensor-parallel degrees (default 4,8; cpu: 2,4)")
    parser.add_argument("--kept", help="mean tokens that a KV head keeps (default 128,256,512,1024; cpu: 64,128)")
    parser.add_argument("--batch", type=int, help="sequences decoded together (default 60; cpu: 6)")
    parser.add_argument("--layers", type=int, help="layers, each with budgets of its own (default 8; cpu: 2)")
    parser.add_argument("--repeats", type=int, help="timed runs of every rank and layer (default 9; cpu: 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads on the CPU (default 1)")
    parser.add_argument("--methods", default=",".join(METHODS), help="as for fairkv.py (default: all)")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the heads' log-normal budgets (default 0.8)")
    parser.add_argument("--seed", type=int, default=222, help="of the budgets (default 222)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads of a layer (default 8)")
    for name, value in SHAPES["cuda"].items():
        kind = {"choices": DTYPES} if name == "dtype" else {"type": int}
        text = f"default {value}: Llama 3 70B; cpu: {SHAPES['cpu'][name]}"
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **kind)  # type: ignore[arg-type]
    arguments = parser.parse_args(argv)
    for name, value in {**DEFAULTS[arguments.device], **SHAPES[arguments.device]}.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    arguments.tp = whole_numbers(parser, "--tp", arguments.tp)
    arguments.kept = whole_numbers(parser, "--kept", arguments.kept)
    arguments.methods = method_names(parser, arguments.methods, METHODS)
    sizes = (
        "threads",
        "batch",
        "layers",
        "repeats",
        "sigma",
        "kv-heads",
        "group",
        "head-dim",
        "hidden",
        "intermediate",
    )
    check_positive(parser, arguments, *sizes, "threads")
    if arguments.tp[-1] > arguments.kv_heads or arguments.intermediate % arguments.tp[-1]:
        parser.error(
            f"--tp {arguments.tp[-1]}: allowed: up to --kv-heads {arguments.kv_heads}, and divisors of --intermediate "
            f"{arguments.intermediate}"
        )
    return arguments


def measure_cell(arguments: argparse.Namespace, bench: Any, tp: int, kept: int) -> list[dict[str, Any]]:
    """The rows of one degree and budget."""
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
        attention = ranks.attention_seconds(bench)
        held = ranks.held_heads()
        for number in sorted(set(held.flat) - set(dense)):
            layer = DenseLayer(shape, number, arguments.hidden, arguments.intermediate // tp, arguments.batch)
            dense[number] = bench.seconds(layer)
        whole = attention.copy()
        for number, seconds in dense.items():
            whole[:, held == number] += seconds[:, None]
        # Every layer is as slow as its slowest rank.
        slowest = attention.max(axis=2).sum(axis=1)
        rows.append(
            {
                "method": name,
                "ranks": tp,
                "kept": kept,
                "batch": arguments.batch,
                "seconds": slowest.tolist(),
                "whole_seconds": whole.max(axis=2).sum(axis=1).tolist(),
                "rank_seconds": attention.sum(axis=1).tolist(),
                "busy_rates": (attention.sum(axis=1) / slowest[:, None]).mean(axis=0).tolist(),
                "busy": (attention.sum(axis=1) / slowest[:, None]).T.tolist(),
                **facts,
            }
        )
    return rows


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``attention`` and ``whole``, each from degree to kept tokens to `harness.fairkv_report.summarise`."""
    from harness.fairkv_report import summarise as cell

    found: dict[str, Any] = {"attention": {}, "whole": {}}
    for tp in sorted({row["ranks"] for row in rows}):
        for kept in sorted({row["kept"] for row in rows}):
            some = [row for row in rows if (row["ranks"], row["kept"]) == (tp, kept)]
            found["attention"].setdefault(str(tp), {})[str(kept)] = cell(some)
            whole = [_whole(row) for row in some]
            found["whole"].setdefault(str(tp), {})[str(kept)] = cell(whole)
    return found


def _whole(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of attention and matrix products together; how busy ranks are is known of attention alone."""
    return {**{name: value for name, value in row.items() if name != "busy"}, "seconds": row["whole_seconds"]}


def run(arguments: argparse.Namespace) -> None:
    """Measure every budget at every degree, and report."""
    import torch
    from harness.fairkv_figures import draw_figures
    from harness.fairkv_report import show
    from harness.report import describe_machine, publish
    from harness.virtual_ranks import Bench
    from tqdm import tqdm

    machine = describe_machine()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    bench = Bench(torch.device(arguments.device), arguments.repeats)
    rows: list[dict[str, Any]] = []
    cells = [(tp, kept) for tp in arguments.tp for kept in arguments.kept]
    for tp, kept in (bar := tqdm(cells, unit="cell")):
        bar.set_postfix_str(f"TP {tp}, {kept} kept")
        rows += measure_cell(arguments, bench, tp, kept)
    summary = summarise(rows)
    for tp, kept in cells:
        some = [row for row in rows if (row["ranks"], row["kept"]) == (tp, kept)]
        size = f"on {tp} virtual ranks, {arguments.batch} x {kept} kept tokens"
        show(f"Attention {size}", some, summary["attention"][str(tp)][str(kept)])
        whole = [_whole(row) for row in some]
        show(f"Attention and matrix products {size}", whole, summary["whole"][str(tp)][str(kept)])
    publish(
        arguments,
        benchmark="fairkv_gpu",
        machine=machine,
        rows=rows,
        summary=summary,
        draw=lambda path: [draw_figures(path.with_suffix(".png"), summary["attention"], DRAWN)],
    )


def main() -> int:
    """Entry of the only process: ranks are virtual here."""
    from harness.single_process import run_single_process

    return run_single_process(parse_arguments(), run)


if __name__ == "__main__":
    sys.exit(main())
