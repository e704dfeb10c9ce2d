"""Decode attention of a layer over batches and budgets, the lines through it, and a step that they predict."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from megakv.costmodel.latency_lines import LatencyModel, LatencySample, fit_latency
from megakv.costmodel.latency_lines import Line as Fit

from .head_division import CONTIGUOUS, make_division, skewed_budgets
from .lines import COLOURS, Line, draw_lines
from .ragged_heads import HeadShape, RankLayer, TokenPool
from .report import align
from .statistics import Interval, median
from .virtual_ranks import Bench, VirtualRanks

STEPS = (CONTIGUOUS, "nodp", "split1", "split3")
"""Whose step is predicted, as in fairkv.py; those that the ranks allow."""

Rows = Sequence[Mapping[str, Any]]


@torch.inference_mode()
def measure_grid(arguments: argparse.Namespace, bench: Bench, shape: HeadShape) -> list[dict[str, Any]]:
    """One layer, every batch and budget in turn; heads keep unequal numbers of tokens, as the steps' heads do."""
    budgets = {
        kept: skewed_budgets(1, shape.kv_heads, kept, arguments.sigma, arguments.seed) for kept in arguments.kept
    }
    pool = TokenPool(shape, max(budgets[arguments.kept[-1]][0]), arguments.seed)
    cells = [(batch, kept) for batch in arguments.batches for kept in arguments.kept]
    layers = [
        RankLayer(pool, make_division(CONTIGUOUS, budgets[kept], ranks=1, batch=batch), 0, 0, batch)
        for batch, kept in tqdm(cells, desc="caches", unit="cache")
    ]
    seconds = bench.by_turns([layer.attend for layer in layers])
    return [
        {"part": "grid", "batch": batch, "kept": kept, "seconds": seconds[:, number].tolist()}
        for number, (batch, kept) in enumerate(cells)
    ]


def measure_steps(arguments: argparse.Namespace, bench: Bench, shape: HeadShape) -> list[dict[str, Any]]:
    """Steps over unequal budgets, as slow in every layer as the slowest rank: the middle batch, the largest budget."""
    batch, kept = arguments.batches[len(arguments.batches) // 2], arguments.kept[-1]
    budgets = skewed_budgets(arguments.layers, shape.kv_heads, kept, arguments.sigma, arguments.seed)
    pool = TokenPool(shape, max(map(max, budgets)), arguments.seed)
    # So many copies make all ranks equal; more would be the same.
    methods = [name for name in STEPS if not name[-1].isdecimal() or int(name[-1]) < arguments.tp]
    rows = []
    for name in tqdm(methods, desc="steps", unit="mapping"):
        division = make_division(name, budgets, ranks=arguments.tp, batch=batch)
        seconds = VirtualRanks(division, pool, batch).attention_seconds(bench)
        rows.append(
            {
                "part": "step",
                "method": name,
                "ranks": arguments.tp,
                "batch": batch,
                "kept": kept,
                "seconds": seconds.max(axis=2).sum(axis=1).tolist(),
                "rank_seconds": seconds.tolist(),
                "loads": [[tokens / batch for tokens in layer] for layer in division.loads()],
                "utilisation": division.utilisation,
            }
        )
    return rows


def fitted(rows: Rows) -> LatencyModel:
    """Through the medians of the grid."""
    return fit_latency(
        LatencySample(row["batch"], row["kept"], median(row["seconds"]).value) for row in rows if row["part"] == "grid"
    )


def summarise(rows: Rows, kv_heads: int) -> dict[str, Any]:
    """The lines, and how far the steps are from what they predict."""
    model = fitted(rows)
    found: dict[str, Any] = {
        "over_batch": {str(kept): asdict(line) for kept, line in model.over_batch.items()},
        "over_budget": {str(batch): asdict(line) for batch, line in model.over_budget.items()},
        "over_tokens": asdict(model.over_tokens),
        "predicted": {},
    }
    for row in rows:
        if row["part"] == "step":
            predicted = model.barrier_seconds(row["loads"], row["batch"], kv_heads)
            # Ranks run one after the other here: the slowest of each repetition would be the one that was disturbed.
            measured = float(np.median(row["rank_seconds"], axis=0).max(axis=1).sum())
            found["predicted"][row["method"]] = {
                "measured_s": measured,
                "predicted_s": predicted,
                "off": predicted / measured - 1,
            }
    return found


def show(rows: Rows, summary: Mapping[str, Any]) -> None:
    """Print the lines and the predictions."""
    for title, name, slope in (
        ("L = alpha B + beta, B sequences", "over_batch", "alpha, us"),
        ("L = gamma C + delta, C kept tokens a head", "over_budget", "gamma, us"),
    ):
        key = "kept" if name == "over_batch" else "batch"
        lines = [[key, slope, "beta, us" if name == "over_batch" else "delta, us", "R^2"]]
        lines += [[value, *_shown(line)] for value, line in summary[name].items()]
        print(f"\n{title}\n{align(lines)}")
    tokens = summary["over_tokens"]
    print(
        f"\nall: {1e9 * tokens['slope']:.1f} ns for a token of every head, {1e6 * tokens['intercept']:.1f} us a "
        f"layer, R^2 {tokens['r_squared']:.4f}"
    )
    steps = [row for row in rows if row["part"] == "step"]
    lines = [["method", "tokens say", "ms a step", "predicted", "off"]]
    for row in steps:
        found = summary["predicted"][row["method"]]
        times = [f"{1e3 * found[name]:.3f}" for name in ("measured_s", "predicted_s")]
        shown = [f"{row['utilisation']:.3f}", *times, f"{found['off']:+.1%}"]
        lines.append([row["method"], *shown])
    size = f"{steps[0]['ranks']} ranks, {steps[0]['batch']} x {steps[0]['kept']} kept tokens"
    print(f"\nA step's attention by the slowest rank of every layer, {size}\n{align(lines)}")


def _shown(line: Mapping[str, float]) -> list[str]:
    return [f"{1e6 * line['slope']:.3f}", f"{1e6 * line['intercept']:.1f}", f"{line['r_squared']:.4f}"]


def draw(path: Path, subtitle: str, rows: Rows, summary: Mapping[str, Any]) -> list[Path]:
    """Draw the paper's Figure 1: time by batch, a line for each budget, and by budget, a line for each batch."""
    drawn = []
    for name, x, group, label, title in (
        ("over_batch", "batch", "kept", "{} kept tokens", "Decode attention of a layer by batch"),
        ("over_budget", "kept", "batch", "batch {}", "Decode attention of a layer by kept tokens"),
    ):
        lines: list[Line] = []
        for number, (value, fit) in enumerate(summary[name].items()):
            cells = [row for row in rows if row["part"] == "grid" and row[group] == int(value)]
            places = [row[x] for row in cells]
            colour = COLOURS[number % len(COLOURS)]
            points = [median(row["seconds"]).scaled(1e3) for row in cells]
            lines.append(Line(label.format(value), places, points, joined=False, colour=colour))
            ends = [1e3 * Fit(**fit).at(place) for place in places]
            # Matplotlib leaves out of the legend what begins with a line.
            lines.append(
                Line("_fit", places, [Interval(y, y, y) for y in ends], dashed=True, colour=colour, marked=False)
            )
        picture = path.with_suffix(f".{x}.png")
        draw_lines(
            picture,
            lines,
            title=title,
            subtitle=subtitle,
            x_label="sequences decoded together" if x == "batch" else "tokens that each KV head keeps",
            y_label="milliseconds",
            log_x=False,
        )
        drawn.append(picture)
    return drawn
