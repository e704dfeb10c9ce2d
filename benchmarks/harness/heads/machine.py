"""Decode steps of tensor-parallel ranks that are not there: of every rank the kernels, timed alone on this machine.

A layer lasts as long as the slowest rank's attention and projections, then the MLP, which ranks share evenly; the cost
model adds what no single rank can show: sums over ranks, what sharing heads takes, and a layer's small operations. So
ranks do not compete here for memory, as they would as processes of one host. The output head is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import load_profile
from megakv.costmodel.head_times import HeadTimes, RankWork
from megakv.costmodel.shape import ModelShape

from ..models import DTYPES, model_config
from ..profiles import keep, lone_profile
from ..statistics import RESAMPLES, SEED, Interval, interval
from .division import Division, make_division, skewed_budgets
from .kernels import Bench, Dense, HeadShape, TokenPool, VirtualRanks

Row = Mapping[str, Any]
EXCHANGED = ("exchange", "exchange_inside", "exchange_collective", "sums", "devices_per_host")
HOW = (
    "the kernels of every rank timed alone on one machine, one rank after the other, and put together by the cost "
    "model: no step of so many ranks was measured"
)


class VirtualMachine:
    """Steps on any number of ranks, as this machine's kernels and the sums of another machine make them."""

    def __init__(self, arguments: argparse.Namespace, sums: Path):
        self._arguments = arguments
        device, dtype = torch.device("cpu"), DTYPES[arguments.dtype]
        heads = arguments.kv_heads * arguments.group
        config = model_config(argparse.Namespace(**{**vars(arguments), "heads": heads, "vocab": 1}))
        self._model = ModelShape.from_config(config, dtype=dtype)
        self._shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, dtype, device)
        own, other = lone_profile(device, self._model, arguments.profile_seconds), load_profile(sums, setting="--sums")
        # Its ranks exchange as the other's do.
        self._profile = own.model_copy(update={name: getattr(other, name) for name in EXCHANGED})
        keep(self._profile, arguments, "1")
        self._bench = Bench(device, arguments.repeats)

    def measure(self, tp: int, batch: int, kept: int, methods: Sequence[str]) -> list[dict[str, Any]]:
        """A row for every method."""
        arguments = self._arguments
        shared = self._profile.sum_times(tp, shared_memory=True) is not None
        times = HeadTimes(self._profile, self._model, tp_size=tp, batch=batch, shared_memory=shared)
        budgets = skewed_budgets(arguments.layers, arguments.kv_heads, kept, arguments.sigma, arguments.seed)
        divisions = [make_division(name, budgets, ranks=tp, batch=batch, times=times) for name in methods]
        kernels, feed_forward = self._kernels(divisions, tp, batch)
        rows = []
        for division, seconds in zip(divisions, kernels, strict=True):
            row = {"ranks": tp, "batch": batch, "kept": kept, "method": division.name}
            row |= {"rank_kernel_seconds": seconds.tolist(), "feed_forward_seconds": feed_forward.tolist()}
            rows.append({**row, **self._modelled(division, times), **division.facts()})
        return rows

    def _kernels(self, divisions: Sequence[Division], tp: int, batch: int) -> tuple[Any, Any]:
        """Seconds: by division attention and projections, ``[repeats, layers, ranks]``; MLP ``[repeats, layers]``."""
        arguments = self._arguments
        longest = max(max(row) for division in divisions for row in division.budgets)
        pool = TokenPool(self._shape, longest, arguments.seed)
        dense = Dense(self._shape, arguments.hidden, arguments.intermediate, batch)
        virtual, found, shared = [VirtualRanks(each, pool, batch) for each in divisions], [], []
        for layer in range(arguments.layers):
            works: list[Any] = []
            for ranks in virtual:
                for rank, heads in zip(ranks.layer(layer), ranks.held[layer].tolist(), strict=True):
                    works.append(lambda rank=rank, heads=heads: (dense.projections(heads), rank.attend()))
                works.append(partial(dense.feed_forward, tp))
            with torch.inference_mode():
                seconds = self._bench.by_turns(works).reshape(arguments.repeats, len(divisions), tp + 1)
            found.append(np.moveaxis(seconds[..., :tp], 1, 0))
            shared.append(seconds[..., tp].mean(axis=1))
        return np.stack(found, axis=2), np.stack(shared, axis=1)

    def _modelled(self, division: Division, times: HeadTimes) -> dict[str, float]:
        """Predicted seconds: of the whole step, and of all in it but kernels."""
        predicted = exchanged = 0.0
        dense = TokenTimes(self._profile, self._model, tp_size=times.tp_size)
        issued = times.attention([RankWork(0, 0)] * times.tp_size)
        works = division.works(times.batch)
        for layer, seconds in enumerate(division.layer_seconds(times)):
            kernels = times.costs(layer).slowest(works[layer]) + issued + dense.feed_forward(layer, times.batch)
            predicted += seconds
            exchanged += seconds - kernels
        return {"predicted_step_s": predicted, "modelled_s": exchanged}


def step_seconds(row: Row, rounds: Any = slice(None)) -> float:
    """A row's step: of every rank and layer the median of some rounds, and the slowest rank's of every layer."""
    ranks, shared = (np.asarray(row[name])[rounds] for name in ("rank_kernel_seconds", "feed_forward_seconds"))
    kernels = np.median(ranks, axis=0).max(axis=-1) + np.median(shared, axis=0)
    return float(kernels.sum()) + float(row["modelled_s"])


def step_ratio(slow: Row, fast: Row) -> Interval:
    """Ratio of two steps of one regime; the interval is over rounds, whose kernels were timed in turn."""
    count, rng = len(slow["rank_kernel_seconds"]), np.random.default_rng(SEED)
    drawn = rng.integers(0, count, (RESAMPLES // 20, count))
    resampled = np.array([step_seconds(slow, rounds) / step_seconds(fast, rounds) for rounds in drawn])
    return interval(step_seconds(slow) / step_seconds(fast), resampled)
