"""Decode steps of tensor-parallel ranks that are not there: of every rank the kernels, timed alone on one device.

A layer lasts as long as the slowest rank's attention and projections, then the MLP, which ranks share evenly. With a
profile the cost model adds what no single rank can show: sums over ranks, what sharing heads takes, and a layer's small
operations. So ranks do not compete here for memory, as they would as processes of one host. There is no output head.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megakv.attention.merge import merge_by_owner
from megakv.base.errors import MegaKVError
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile, load_profile
from megakv.costmodel.head_times import HeadTimes, RankWork
from megakv.costmodel.shape import ModelShape

from ..models import DTYPES, model_config
from ..predictions import lone_profile
from ..statistics import RESAMPLES, SEED, Interval, interval
from .division import Division, make_division, skewed_budgets
from .kernels import Bench, Dense, HeadShape, RankLayer, TokenPool

Row = Mapping[str, Any]
EXCHANGED = ("exchange", "exchange_inside", "exchange_collective", "sums", "devices_per_host")
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 5e-3}
HOW = (
    "the kernels of every rank timed alone on one device, one rank after the other, and put together: no step of so "
    "many ranks was measured"
)


class VirtualMachine:
    """Steps on any number of ranks, as this machine's kernels and the sums of another machine make them."""

    def __init__(self, arguments: argparse.Namespace, sums: Path):
        self._arguments = arguments
        device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
        heads = arguments.kv_heads * arguments.group
        config = model_config(argparse.Namespace(**{**vars(arguments), "heads": heads, "vocab": 1}))
        self._model = ModelShape.from_config(config, dtype=dtype)
        self._shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, dtype, device)
        self._profile: HardwareProfile | None = None
        if arguments.profile_seconds:
            own = lone_profile(device, self._model, arguments.profile_seconds)
            # Its ranks exchange as the other's do.
            other = load_profile(sums, setting="--sums")
            self._profile = own.model_copy(update={name: getattr(other, name) for name in EXCHANGED})
        self._bench = Bench(device, arguments.repeats)

    @torch.inference_mode()
    def measure(self, tp: int, batch: int, kept: int, methods: Sequence[str]) -> list[dict[str, Any]]:
        """A row for every method, the first of them contiguous heads."""
        arguments, times = self._arguments, None
        if self._profile is not None:
            shared = self._profile.sum_times(tp, shared_memory=True) is not None
            times = HeadTimes(self._profile, self._model, tp_size=tp, batch=batch, shared_memory=shared)
        budgets = skewed_budgets(arguments.layers, arguments.kv_heads, kept, arguments.sigma, arguments.seed)
        divisions = [make_division(name, budgets, ranks=tp, batch=batch, times=times) for name in methods]
        dense = Dense(self._shape, arguments.hidden, arguments.intermediate, batch)
        pool = TokenPool(self._shape, max(map(max, budgets)), arguments.seed)
        layers = [self._layer(number, divisions, pool, dense, tp, batch) for number in range(arguments.layers)]
        rows = []
        for index, division in enumerate(divisions):
            row = {"ranks": tp, "batch": batch, "kept": kept, "method": division.name}
            for name, place in (("attention_seconds", 0), ("rank_kernel_seconds", 1)):
                row[name] = np.stack([each[:, index, :, place] for each, _ in layers], axis=1).tolist()
            row["feed_forward_seconds"] = np.stack([shared for _, shared in layers], axis=1).tolist()
            rows.append({**row, **(self._modelled(division, times) if times else {}), **division.facts()})
        return rows

    def _layer(
        self, number: int, divisions: Sequence[Division], pool: TokenPool, dense: Dense, tp: int, batch: int
    ) -> tuple[Any, Any]:
        """Seconds ``[repeats, divisions, ranks, 2]``, of attention and with projections; ``[repeats]`` of the MLP."""
        ranks = [[RankLayer(pool, each, number, rank, batch) for rank in range(tp)] for each in divisions]
        if number == 0:
            self._check(divisions, ranks)
        works: list[Any] = [partial(dense.feed_forward, tp)]
        for division, own in zip(divisions, ranks, strict=True):
            for rank, pieces in zip(own, division.pieces[number], strict=True):
                heads = len({piece.head for piece in pieces})
                works.append(rank.attend)
                works.append(lambda rank=rank, heads=heads: (dense.projections(heads), rank.attend()))
        seconds = self._bench.by_turns(works)
        return seconds[:, 1:].reshape(len(seconds), len(divisions), tp, 2), seconds[:, 0]

    def _check(self, divisions: Sequence[Division], ranks: Sequence[Sequence[RankLayer]]) -> None:
        """Every way must compute what contiguous heads do."""
        found = []
        for own in ranks:
            outs, lses = (torch.cat(each) for each in zip(*(rank.attend() for rank in own), strict=True))
            owners = torch.cat([rank.index for rank in own])
            found.append(merge_by_owner(outs, lses, owners, own[0].rows)[0])
        for division, out in zip(divisions, found, strict=True):
            difference = float((out - found[0]).abs().max() / found[0].abs().max())
            if not difference <= TOLERANCE[self._arguments.dtype]:
                raise MegaKVError(f"{division.name}: outputs differ by {difference:.1e} of contiguous heads' largest")

    def _modelled(self, division: Division, times: HeadTimes) -> dict[str, float]:
        """Predicted seconds: of the whole step, and of all in it but kernels."""
        predicted = exchanged = 0.0
        assert self._profile is not None
        dense = TokenTimes(self._profile, self._model, tp_size=times.tp_size)
        issued = times.attention([RankWork(0, 0)] * times.tp_size)
        works = division.works(times.batch)
        for layer, seconds in enumerate(division.layer_seconds(times)):
            kernels = times.costs(layer).slowest(works[layer]) + issued + dense.feed_forward(layer, times.batch)
            predicted += seconds
            exchanged += seconds - kernels
        return {"predicted_step_s": predicted, "modelled_s": exchanged}


def step_seconds(row: Row, rounds: Any = slice(None), *, whole: bool = True) -> float:
    """A row's step, or its attention: of each rank the median of some rounds, and the slowest rank's of each layer."""
    name = "rank_kernel_seconds" if whole else "attention_seconds"
    slowest = np.median(np.asarray(row[name])[rounds], axis=0).max(axis=-1)
    if not whole:
        return float(slowest.sum())
    shared = np.median(np.asarray(row["feed_forward_seconds"])[rounds], axis=0)
    return float((slowest + shared).sum()) + float(row.get("modelled_s", 0.0))


def step_ratio(slow: Row, fast: Row, *, whole: bool = True) -> Interval:
    """Ratio of two steps of one regime; the interval is over rounds, whose kernels were timed in turn."""
    count, rng = len(slow["rank_kernel_seconds"]), np.random.default_rng(SEED)
    drawn = rng.integers(0, count, (RESAMPLES // 20, count))
    both = [[step_seconds(row, rounds, whole=whole) for rounds in (slice(None), *drawn)] for row in (slow, fast)]
    value, *resampled = (one / other for one, other in zip(*both, strict=True))
    return interval(value, np.array(resampled))
