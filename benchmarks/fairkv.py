"""Decoding over caches whose heads keep unequal numbers of tokens: contiguous heads against FairKV's mappings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import psutil
from harness.heads import report as made
from harness.heads.division import BY_TOKENS, CHOSEN, CONTIGUOUS, HEAD_METHODS, UNIFORM, kept_heads
from harness.heads.steps import measure_parts, measure_regimes
from harness.launch import Found, Rows, Summary, benchmark
from harness.options import Options, check_memory
from harness.statistics import median, paired_ratio

TITLES = {"attention": "Attention of a step", "engine": "A decode step"}
REGIMES = "regimes"
ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}
USABLE = 0.75  # Share of the machine's memory that a part may take
PROCESS_BYTES = 500 << 20  # Of a rank before it has weights or caches, and of the processes that start them


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.ranks()
    options.profile({"": 30.0, "quick": 5.0})
    options.add("--quick", False, "smaller and fewer")
    options.names("--methods", HEAD_METHODS, "uniform,contiguous,nodp,dp1,dp2,dp3,dp4,split1,split3", "which to run")
    options.names("--parts", (*TITLES, REGIMES), ",".join((*TITLES, REGIMES)), "what to measure")
    options.add("--batch", 4, "sequences decoded together")
    options.add("--kept", {"": 16384, "quick": 2048}, "mean tokens that a KV head keeps")
    options.add("--layers", 8, "layers of a step")
    # By default as in Llama 3.1 405B.
    kept_heads(options, group=16)
    options.add("--hidden", 512, "of the engine's Llama")
    options.add("--intermediate", 1408, "of the engine's Llama")
    options.add("--vocab", 8192, "of the engine's Llama")
    options.add("--steps", 1, "attention steps of a sample, of which it is the mean")
    options.add("--tokens", 2, "engine steps of a sample, of which it is the mean")
    options.add("--repeats", {"": 25, "quick": 9}, "rounds of all methods at most")
    # Those of Llama 3.1 8B.
    options.add("--wide-hidden", 4096, "hidden size of the regimes' Llama")
    options.add("--wide-intermediate", 14336, "of the regimes' Llama")
    options.add("--wide-group", 4, "its query heads to a KV head")
    options.add("--wide-layers", 2, "its layers")
    options.numbers("--regime-batches", {"": "1,4,16", "quick": "1,8"}, "batches of the regimes")
    options.numbers("--regime-kept", "256,1K,4K,16K", "kept tokens of the regimes")
    options.add("--regime-seconds", {"": 60.0, "quick": 15.0}, "no further round of a regime begins after them")
    options.add("--cell-seconds", {"": 130.0, "quick": 20.0}, "no further round of a part begins after them")
    arguments = options.parse(argv)
    ranks, kv_heads = arguments.ranks, arguments.kv_heads
    arguments.heads = kv_heads * arguments.group
    if ranks > kv_heads:
        options.error(f"--ranks {ranks}: allowed: up to --kv-heads {kv_heads}, a head for each rank")
    if {"engine", REGIMES}.intersection(arguments.parts) and kv_heads % ranks:
        remedy = "which plain tensor parallelism divides evenly; or --parts attention"
        options.error(f"--kv-heads {kv_heads}: allowed: multiples of --ranks {ranks}, {remedy}")
    if REGIMES in arguments.parts and not arguments.profile_seconds:
        options.error(f"--profile-seconds 0: {REGIMES} are predicted gains beside measured ones: allowed: more than 0")
    for part, prefix in (("engine", ""), (REGIMES, "wide_")):
        hidden, heads = getattr(arguments, f"{prefix}hidden"), kv_heads * getattr(arguments, f"{prefix}group")
        if part in arguments.parts and hidden % heads:
            words = prefix.replace("_", "-")
            of = f"multiples of --kv-heads x --{words}group = {heads}"
            options.error(f"--{words}hidden {hidden}: allowed: {of}, or --parts without {part}")
    words = f"--batch {arguments.batch} with --kept {arguments.kept}, --layers {arguments.layers} and --hidden"
    wide = wide_arguments(arguments)
    larger = f"--regime-batches up to {wide.batch} with --regime-kept up to {wide.kept} and --wide-hidden"
    sizes = [(needed_bytes(arguments), f"{words} {arguments.hidden}")]
    sizes += [(needed_bytes(wide), f"{larger} {wide.hidden}")] if REGIMES in arguments.parts else []
    try:
        for needed, named in sizes:
            check_memory(needed, USABLE * psutil.virtual_memory().total, named)
    except ValueError as error:
        options.error(str(error))
    return arguments


def wide_arguments(arguments: argparse.Namespace) -> argparse.Namespace:
    """Arguments of the regimes: a real model's widths, all batches and kept tokens, and the largest of each."""
    own = {name: getattr(arguments, f"wide_{name}") for name in ("hidden", "intermediate", "group", "layers")}
    own |= {
        "heads": arguments.kv_heads * arguments.wide_group,
        "parts": ["engine"],
        "methods": [CONTIGUOUS, *BY_TOKENS, CHOSEN],
    }
    own |= {"regimes": list(product(arguments.regime_batches, arguments.regime_kept))}
    own |= {"batch": arguments.regime_batches[-1], "kept": arguments.regime_kept[-1]}
    return argparse.Namespace(**{**vars(arguments), **own})


def needed_bytes(arguments: argparse.Namespace) -> int:
    """Memory of the largest part: one method's cache at a time, and what building a layer takes."""
    item, layers, hidden = ITEM[arguments.dtype], arguments.layers, arguments.hidden
    tokens = arguments.batch * arguments.kv_heads * arguments.kept
    needed = 2 * arguments.head_dim * tokens * (layers + 2) * item + (arguments.ranks + 1) * PROCESS_BYTES
    if "engine" in arguments.parts:
        # Of every placement its own weights.
        placements = len(set(arguments.methods) - {UNIFORM})
        heads = 2 * (arguments.heads + arguments.kv_heads) * arguments.head_dim + 3 * arguments.intermediate
        copies = sum(int(name[-1]) for name in arguments.methods if name[-1].isdecimal())
        copied = 2 * (arguments.group + 1) * arguments.head_dim * copies
        whole = 2 * arguments.vocab * arguments.ranks * placements
        needed += hidden * (layers * (placements * heads + copied) + whole) * item
    return int(needed)


def measure_rank(arguments: argparse.Namespace, world: Any) -> Rows:
    parts = [part for part in arguments.parts if part in TITLES]
    rows = measure_parts(arguments, world, parts) if parts else []
    return rows + (measure_regimes(wide_arguments(arguments), world) if REGIMES in arguments.parts else [])


def report(arguments: argparse.Namespace, rows: Rows, skipped: dict[str, str]) -> Found:
    size = f"on {arguments.ranks} ranks, {arguments.batch} x {arguments.kept:,} kept tokens"
    subtitle = (
        f"{arguments.layers} layers of {arguments.kv_heads} KV heads, {arguments.group} query heads each, sigma "
        f"{arguments.sigma:g}, {arguments.dtype}, {arguments.threads} thread(s) per rank; median, 95% interval"
    )
    summary, charts = Summary(), []
    for part in [part for part in arguments.parts if part in TITLES]:
        own, title = [row for row in rows if row["part"] == part], f"{TITLES[part]} {size}"
        summary[part] = made.summarise(own)
        made.show_part(title, own, summary[part])
        charts.append(made.chart(part, title, subtitle, own))
    if REGIMES in arguments.parts:
        own = [row for row in rows if row["part"] == REGIMES]
        regimes = made.by_regime(own, "{batch} x {kept}")
        found = made.gains(
            regimes,
            "predicted_s",
            lambda base, row: paired_ratio(base["seconds"], row["seconds"]),
            lambda row: median(row["seconds"]).value,
        )
        found["left_alone"] = [f"{row['batch']} x {row['kept']}" for row in own if row["left_alone"]]
        columns = "batch kept method copies utilisation:% seconds:ms predicted_s:ms"
        made.show_gains(regimes, found, columns, "Steps at true widths, by regime: gain over contiguous heads")
        shape = f"hidden {arguments.wide_hidden}, {arguments.kv_heads} KV heads, {arguments.wide_layers} layers"
        subtitle = f"{arguments.ranks} ranks, {shape}, {arguments.dtype}; dashed: predicted, not fitted to these steps"
        charts.append(made.gains_chart(regimes, found, subtitle))
        summary |= found
    return rows, summary, charts


if __name__ == "__main__":
    sys.exit(benchmark("fairkv", parse_arguments(), measure_rank, report, shared_memory=True))
