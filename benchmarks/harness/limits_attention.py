"""Attention to a prompt's causal square against the machine's matrix products of its type, and PyTorch's kernel."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from tqdm import tqdm

from megakv.attention.backends import attend_block, cpu_flash

from .charts import groups
from .launch import Rows, Summary
from .models import DTYPES
from .publish import show
from .statistics import median, paired_ratio

Call = Callable[[], object]


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each case: seconds of each round, in which everything takes its turn."""
    cases = [*product(arguments.dtypes, arguments.head_dims, arguments.groups, arguments.keys)]
    rows = []
    for dtype, head_dim, group, keys in (bar := tqdm(cases, unit="case")):
        bar.set_postfix_str(f"{dtype}, head dim {head_dim}, group {group}, {keys} keys")
        kv_heads = arguments.heads // group
        size = {"dtype": dtype, "head_dim": head_dim, "heads": kv_heads * group, "kv_heads": kv_heads, "keys": keys}
        found = rounds(calls(**size, matrix=arguments.matrix), arguments.repeats)
        # Pairs that are visible, and no others.
        flops = 4 * head_dim * kv_heads * group * keys * (keys + 1) // 2
        rate = {"flops": flops, "matrix_flops": 2 * arguments.matrix**3}
        rows.append({**size, "threads": arguments.threads, **rate, **found})
    return rows


def calls(*, dtype: str, head_dim: int, heads: int, kv_heads: int, keys: int, matrix: int) -> dict[str, Call]:
    """By name: MegaKV's attention; PyTorch's kernel in the inputs' type and in float32; a matrix product."""
    kind, scale = DTYPES[dtype], head_dim**-0.5
    q = torch.randn(keys, heads, head_dim).to(kind).transpose(0, 1)
    k, v = (torch.randn(kv_heads, keys, head_dim).to(kind) for _ in range(2))
    a, b = (torch.randn(matrix, matrix).to(kind) for _ in range(2))

    def torch_kernel() -> object:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], 0.0, True, scale=scale
        )

    found: dict[str, Call] = {
        "seconds": lambda: attend_block(q, k, v, scale, causal=True),
        "torch_seconds": torch_kernel,
        "matrix_seconds": lambda: a @ b,
    }
    if dtype != "fp32":
        found["torch_float32_seconds"] = lambda: cpu_flash(q, k, v, scale, causal=True)
    return found


def rounds(calls: Mapping[str, Call], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call in each round; a first one fills caches and starts threads."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begun)
    return {name: taken[1:] for name, taken in seconds.items()}


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """Rates and shares, which are put into the rows; by type the lowest of all cases, and the charts."""
    for row in rows:
        row["case"] = f"{row['heads']}:{row['kv_heads']} heads of {row['head_dim']}, {row['keys'] // 1024}K"
        row["gflops"] = median([row["flops"] / each / 1e9 for each in row["seconds"]]).value
        row["torch_gflops"] = median([row["flops"] / each / 1e9 for each in row["torch_seconds"]]).value
        row["matrix_gflops"] = median([row["matrix_flops"] / each / 1e9 for each in row["matrix_seconds"]]).value
        rate = row["flops"] / row["matrix_flops"]
        row["share"] = paired_ratio([rate * each for each in row["matrix_seconds"]], row["seconds"]).to_json()
        faster = min(("torch_seconds", "torch_float32_seconds"), key=lambda name: median(row.get(name, [1e9])).value)
        row["speedup"] = paired_ratio(row[faster], row["seconds"]).to_json()
    columns = "dtype case seconds:ms gflops torch_gflops matrix_gflops share speedup"
    show(rows, columns, "Causal attention; GFLOP/s of visible pairs, shares of the matrix rate of the type")
    kinds = dict.fromkeys(row["dtype"] for row in rows)
    own = {kind: [row for row in rows if row["dtype"] == kind] for kind in kinds}
    summary = {
        f"attention_{name}": {kind: min(row[name]["value"] for row in own[kind]) for kind in kinds}
        for name in ("share", "speedup")
    }
    words = {
        "title": "Attention to a prompt, and what the machine can do",
        "subtitle": f"causal, {rows[0]['threads']} threads; median, 95% interval; query:KV heads, tokens",
        "y_label": "GFLOP/s, more is better",
    }
    bars = ("MegaKV", "flops", "seconds"), ("PyTorch's kernel", "flops", "torch_seconds")
    bars = (*bars, ("matrix product", "matrix_flops", "matrix_seconds"))
    charts = []
    for kind in kinds:
        drawn = [
            {"case": row["case"].replace(" heads of ", "\n").replace(", ", "\n"), "what": what,
             "rate": [row[flops] / each / 1e9 for each in row[seconds]]}
            for row in own[kind] for what, flops, seconds in bars
        ]  # fmt: skip
        charts.append(groups(f"attention.{kind}", drawn, "case", "what", "rate", **words))
    return summary, charts
