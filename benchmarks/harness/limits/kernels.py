"""Kernels against what the machine can do at all: attention to a prompt's causal square against matrix products and
PyTorch's kernel, products of one row with a model's weights against reading memory and PyTorch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from megakv.attention.backends import attend_block, cpu_flash
from megakv.weights.products import rows_product

from ..launch import Rows, Summary
from ..models import DTYPES
from ..publish import show
from ..statistics import median, paired_ratio
from ..timing import Call, by_turns

SHAPES = (576, 576), (1536, 576), (576, 1536), (49152, 576), (4096, 4096)
"""Outputs and inputs: SmolLM2's queries, gate, down projection and output head, and a square of larger models."""


def measure_attention(arguments: argparse.Namespace) -> Rows:
    """A row for each case: seconds of each round, in which everything takes its turn."""
    rows = []
    cases = product(arguments.dtypes, arguments.head_dims, arguments.groups, arguments.keys)
    for dtype, head_dim, group, keys in tqdm([*cases], desc="attention", unit="case"):
        kv_heads = arguments.heads // group
        size = {"dtype": dtype, "head_dim": head_dim, "heads": kv_heads * group, "kv_heads": kv_heads, "keys": keys}
        found = by_turns(attention_calls(**size, matrix=arguments.matrix), arguments.repeats)
        # Pairs that are visible, and no others.
        flops = 4 * head_dim * kv_heads * group * keys * (keys + 1) // 2
        rate = {"flops": flops, "matrix_flops": 2 * arguments.matrix**3}
        rows.append({**size, "threads": arguments.threads, **rate, **found})
    return rows


def attention_calls(*, dtype: str, head_dim: int, heads: int, kv_heads: int, keys: int, matrix: int) -> dict[str, Call]:
    """By name: MegaKV's attention; PyTorch's kernel in the inputs' type and in float32; a matrix product."""
    kind, scale = DTYPES[dtype], head_dim**-0.5
    q = torch.randn(keys, heads, head_dim).to(kind).transpose(0, 1)
    k, v = (torch.randn(kv_heads, keys, head_dim).to(kind) for _ in range(2))
    a, b = (torch.randn(matrix, matrix).to(kind) for _ in range(2))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found: dict[str, Call] = {
        "seconds": lambda: attend_block(q, k, v, scale, causal=True),
        "torch_seconds": lambda: flash(q[None], k[None], v[None], 0.0, True, scale=scale),
        "matrix_seconds": lambda: a @ b,
    }
    if dtype != "fp32":
        found["torch_float32_seconds"] = lambda: cpu_flash(q, k, v, scale, causal=True)
    return found


def report_attention(rows: Rows) -> tuple[Summary, list[Any]]:
    """Rates and shares, which are put into the rows; by type the lowest of all cases."""
    for row in rows:
        row["case"] = f"{row['heads']}:{row['kv_heads']} heads of {row['head_dim']}, {row['keys'] // 1024}K"
        for name, size in (("", "flops"), ("torch_", "flops"), ("matrix_", "matrix_flops")):
            row[f"{name}gflops"] = rate(row, size, f"{name}seconds")
        matrix = [row["flops"] / row["matrix_flops"] * each for each in row["matrix_seconds"]]
        row["share"] = paired_ratio(matrix, row["seconds"]).to_json()
        faster = min(("torch_seconds", "torch_float32_seconds"), key=lambda name: median(row.get(name, [1e9])).value)
        row["speedup"] = paired_ratio(row[faster], row["seconds"]).to_json()
    columns = "dtype case seconds:ms gflops torch_gflops matrix_gflops share speedup"
    show(rows, columns, "Causal attention; GFLOP/s of visible pairs, shares of the matrix rate of the type")
    return lowest(rows, "attention"), []


def measure_products(arguments: argparse.Namespace) -> Rows:
    """A row for each case: seconds of each round, in which everything takes its turn."""
    rows = []
    cases = [*product(sorted({1, arguments.threads}), arguments.dtypes, SHAPES)]
    read = torch.zeros(arguments.weights_mb << 17, dtype=torch.int64)
    for threads, dtype, (outputs, inputs) in tqdm(cases, desc="products", unit="case"):
        torch.set_num_threads(threads)
        kind = DTYPES[dtype]
        nbytes = outputs * inputs * kind.itemsize
        # So many that no cache holds them from one round to the next.
        weights = [torch.randn(outputs, inputs).to(kind) for _ in range(max(1, (arguments.weights_mb << 20) // nbytes))]
        found = by_turns(product_calls(torch.randn(1, 1, inputs).to(kind), weights, read), arguments.repeats)
        size = {"dtype": dtype, "outputs": outputs, "inputs": inputs, "threads": threads}
        rows.append({**size, "bytes": len(weights) * nbytes, "read_bytes": read.nbytes, **found})
    torch.set_num_threads(arguments.threads)
    return rows


def product_calls(x: torch.Tensor, weights: Sequence[torch.Tensor], read: torch.Tensor) -> dict[str, Call]:
    """By name: MegaKV's product, PyTorch's, and a sum over as many bytes."""

    @torch.no_grad()
    def own() -> object:
        return [rows_product(x, weight) for weight in weights]

    return {
        "seconds": own,
        "torch_seconds": lambda: [F.linear(x, weight) for weight in weights],
        "read_seconds": lambda: read.sum(),
    }


def report_products(rows: Rows) -> tuple[Summary, list[Any]]:
    """Rates, which are put into the rows; by type the lowest of all cases."""
    for row in rows:
        row["case"] = f"{row['outputs']}x{row['inputs']}, {row['threads']} thr."
        for name, size in (("", "bytes"), ("torch_", "bytes"), ("read_", "read_bytes")):
            row[f"{name}gb_per_s"] = rate(row, size, f"{name}seconds")
        read = [row["bytes"] / row["read_bytes"] * each for each in row["read_seconds"]]
        row["share"] = paired_ratio(read, row["seconds"]).to_json()
        row["speedup"] = paired_ratio(row["torch_seconds"], row["seconds"]).to_json()
    show(rows, "dtype case gb_per_s torch_gb_per_s read_gb_per_s share speedup", "Products of a row; GB/s of weights")
    return lowest(rows, "products"), []


def rate(row: dict[str, Any], size: str, seconds: str) -> float:
    """Billions a second."""
    return median([row[size] / each / 1e9 for each in row[seconds]]).value


def lowest(rows: Rows, part: str) -> Summary:
    kinds = dict.fromkeys(row["dtype"] for row in rows)
    return {
        f"{part}_{name}": {kind: min(row[name]["value"] for row in rows if row["dtype"] == kind) for kind in kinds}
        for name in ("share", "speedup")
    }
