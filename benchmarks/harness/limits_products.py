"""Products of one row with a model's weights, against the machine's rate of reading memory, and PyTorch's."""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from megakv.weights.products import rows_product

from .charts import groups
from .launch import Rows, Summary
from .limits_attention import Call, rounds
from .models import DTYPES
from .publish import show
from .statistics import median, paired_ratio

SHAPES = (576, 576), (1536, 576), (576, 1536), (49152, 576), (4096, 4096)
"""Outputs and inputs: SmolLM2's queries, gate, down projection and output head, and a square of larger models."""


def measure(arguments: argparse.Namespace) -> Rows:
    """A row for each case: seconds of each round, in which everything takes its turn."""
    rows = []
    cases = [*product(sorted({1, arguments.threads}), arguments.dtypes, SHAPES)]
    read = torch.zeros(arguments.weights_mb << 17, dtype=torch.int64)
    for threads, dtype, (outputs, inputs) in (bar := tqdm(cases, unit="case")):
        bar.set_postfix_str(f"{threads} threads, {dtype}, {outputs} x {inputs}")
        torch.set_num_threads(threads)
        kind = DTYPES[dtype]
        nbytes = outputs * inputs * kind.itemsize
        # So many that no cache holds them from one round to the next.
        weights = [torch.randn(outputs, inputs).to(kind) for _ in range(max(1, (arguments.weights_mb << 20) // nbytes))]
        found = rounds(calls(torch.randn(1, 1, inputs).to(kind), weights, read), arguments.repeats)
        size = {"dtype": dtype, "outputs": outputs, "inputs": inputs, "threads": threads}
        rows.append({**size, "bytes": len(weights) * nbytes, "read_bytes": read.nbytes, **found})
    torch.set_num_threads(arguments.threads)
    return rows


def calls(x: torch.Tensor, weights: list[torch.Tensor], read: torch.Tensor) -> dict[str, Call]:
    """By name: MegaKV's product, PyTorch's, and a sum over as many bytes."""

    def own() -> object:
        with torch.no_grad():
            return [rows_product(x, weight) for weight in weights]

    def torchs() -> object:
        return [F.linear(x, weight) for weight in weights]

    return {"seconds": own, "torch_seconds": torchs, "read_seconds": lambda: read.sum()}


def report(rows: Rows) -> tuple[Summary, list[Any]]:
    """Rates, which are put into the rows; by type the lowest of all cases, and the charts."""
    for row in rows:
        row["case"] = f"{row['outputs']}x{row['inputs']}, {row['threads']} thr."
        for name, size in (("", "bytes"), ("torch_", "bytes"), ("read_", "read_bytes")):
            row[f"{name}gb_per_s"] = median([row[size] / each / 1e9 for each in row[f"{name}seconds"]]).value
        scale = row["bytes"] / row["read_bytes"]
        row["share"] = paired_ratio([scale * each for each in row["read_seconds"]], row["seconds"]).to_json()
        row["speedup"] = paired_ratio(row["torch_seconds"], row["seconds"]).to_json()
    show(rows, "dtype case gb_per_s torch_gb_per_s read_gb_per_s share speedup", "Products of a row; GB/s of weights")
    kinds = dict.fromkeys(row["dtype"] for row in rows)
    summary = {
        f"products_{name}": {kind: min(row[name]["value"] for row in rows if row["dtype"] == kind) for kind in kinds}
        for name in ("share", "speedup")
    }
    words = {
        "title": "Weights read by products of a row",
        "subtitle": "outputs x inputs, threads; median, 95% interval",
        "y_label": "GB/s, more is better",
    }
    bars = ("MegaKV", "bytes", "seconds"), ("PyTorch", "bytes", "torch_seconds")
    bars = (*bars, ("reading memory", "read_bytes", "read_seconds"))
    charts = []
    for kind in kinds:
        drawn = [
            {"case": row["case"].replace(", ", "\n"), "what": what, "rate": [row[size] / s / 1e9 for s in row[seconds]]}
            for row in rows if row["dtype"] == kind for what, size, seconds in bars
        ]  # fmt: skip
        charts.append(groups(f"products.{kind}", drawn, "case", "what", "rate", **words))
    return summary, charts
