"""Which rank attends to which kept tokens of a synthetic ragged cache, under every way to divide heads among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megakv.base.loads import barrier_utilisation
from megakv.cache.layer import LayerMapping, contiguous_layer
from megakv.cache.shares import Copies, owners
from megakv.cache.splitting import split_request
from megakv.costmodel.head_times import HeadTimes, RankWork
from megakv.fairkv.budgets import divide
from megakv.fairkv.mapper import map_heads
from megakv.fairkv.mapping import HeadMapping
from megakv.fairkv.profile import BudgetProfile

from ..options import DTYPES, Options

Budgets = list[list[int]]
UNIFORM, CONTIGUOUS, CHOSEN = "uniform", "contiguous", "time"
MAPPED = ("nodp", *(f"{kind}{copies}" for kind in ("dp", "split") for copies in (1, 2, 3, 4)))
HEAD_METHODS = (UNIFORM, CONTIGUOUS, *MAPPED)
"""`uniform`: equal budgets. The others share one skewed profile: the paper's static head allocation, its best-effort
assignment, fair-copying with so many copied heads, and copies that divide a head's tokens."""


def kept_heads(options: Options, *, group: Any, head_dim: Any = 128, dtype: Any = "bf16") -> None:
    """Options: the KV heads of a layer, which keep unequal numbers of tokens."""
    options.add("--sigma", 0.8, "of the heads' log-normal budgets")
    options.add("--seed", 222, "of the budgets", least=0)
    options.add("--kv-heads", 8, "KV heads of a layer")
    options.add("--group", group, "query heads to a KV head")
    options.add("--head-dim", head_dim, "head dimension")
    options.choice("--dtype", DTYPES, dtype, "of queries, keys, values")


def skewed_budgets(layers: int, kv_heads: int, mean: int, sigma: float, seed: int) -> Budgets:
    """``[layer][KV head]`` kept tokens, log-normal; every layer has the same total, every head a token at least."""
    rng = np.random.default_rng(seed)
    weights = np.exp(sigma * rng.standard_normal((layers, kv_heads)))
    total = mean * kv_heads
    return [(1 + divide(total - kv_heads, row, most=total)).tolist() for row in weights]


@dataclass(frozen=True)
class Piece:
    """Kept tokens of one head of one sequence that a rank attends to."""

    sequence: int
    head: int
    start: int  # Of the head's kept tokens
    stop: int


@dataclass(frozen=True)
class Division:
    """Who attends to what."""

    name: str  # Of `HEAD_METHODS`, or `CHOSEN`
    budgets: Budgets  # ``[layer][KV head]``: kept tokens of every sequence
    pieces: list[list[list[Piece]]]  # ``[layer][rank]``: what the rank attends to
    mapping: HeadMapping | None = None  # None: neighbouring heads lie on a rank

    def loads(self) -> list[list[int]]:
        """``[layer][rank]``: tokens of all sequences."""
        return [[sum(piece.stop - piece.start for piece in rank) for rank in layer] for layer in self.pieces]

    def divided(self, layer: int) -> list[int]:
        """Heads of which a sequence's tokens are on several ranks, so that partial results must be merged."""
        budgets = self.budgets[layer]
        return sorted({p.head for rank in self.pieces[layer] for p in rank if p.stop - p.start < budgets[p.head]})

    def works(self, batch: int) -> list[list[RankWork]]:
        """``[layer][rank]`` as the cost model takes it."""
        return [
            [RankWork(len({piece.head for piece in rank}), load / batch) for rank, load in zip(*layer, strict=True)]
            for layer in zip(self.pieces, self.loads(), strict=True)
        ]

    def layer_seconds(self, times: HeadTimes) -> list[float]:
        """Predicted seconds of each layer."""
        return [
            times.costs(layer).seconds(works, times.shared_s(self.shared_entries(layer)))
            for layer, works in enumerate(self.works(times.batch))
        ]

    def shared_entries(self, layer: int) -> int:
        """Replicas of the heads that are `divided`."""
        heads = self.divided(layer)
        return sum(len({piece.head for piece in rank}.intersection(heads)) for rank in self.pieces[layer])

    @property
    def slowest(self) -> int:
        """Sum over layers of the slowest rank's tokens: what the time goes with."""
        return sum(max(layer) for layer in self.loads())

    def facts(self) -> dict[str, Any]:
        """Facts for a row about who attends to how much; `utilisation` is mean load over the slowest rank's."""
        loads = self.loads()
        tokens = [sum(column) for column in zip(*loads, strict=True)]
        known = {"utilisation": barrier_utilisation(loads), "slowest_tokens": self.slowest}
        return {**known, "loads": loads, "rank_tokens": tokens}


def make_division(name: str, budgets: Budgets, *, ranks: int, batch: int, times: HeadTimes | None = None) -> Division:
    """By a method of `HEAD_METHODS`, or as `times` has it fastest."""
    heads, kind, copies = len(budgets[0]), name.rstrip("1234"), int(name[-1]) if name[-1].isdecimal() else 0
    profile = BudgetProfile(model="synthetic", budgets=tuple(tuple(map(float, row)) for row in budgets))
    mapping = None
    if name == UNIFORM:
        budgets = [[sum(row) // heads] * heads for row in budgets]
    elif name == CHOSEN:
        mapping = map_heads(profile, tp_size=ranks, times=times)
    elif kind == "dp":
        shared = {"copied_heads": copies, "max_replicas": min(ranks, _most_replicas(batch))}
        mapping = map_heads(profile, tp_size=ranks, copies=copies, split="even", **shared)
    elif name != CONTIGUOUS:
        mapping = map_heads(profile, tp_size=ranks, copies=copies)
    return divide_by(name, budgets, mapping, ranks=ranks, batch=batch)


def divide_by(name: str, budgets: Budgets, mapping: HeadMapping | None, *, ranks: int, batch: int) -> Division:
    """By a mapping, or contiguous heads; replicas share the batch where the method is one of the paper's."""
    layers = [contiguous_layer(len(budgets[0]), ranks)] * len(budgets) if mapping is None else mapping.layers
    pieces = []
    for number, (layer, row) in enumerate(zip(layers, budgets, strict=True)):
        if copies_of(name) == "batch":
            pieces.append(_whole_sequences(layer, number, row, ranks, batch))
        else:
            fixed = 0 if mapping is None else mapping.fixed(number)
            pieces.append(_parts_of_sequences(layer, row, ranks, batch, fixed))
    return Division(name, budgets, pieces, mapping)


def copies_of(name: str) -> Copies:
    """Say what a method's copies divide, in the words of `megakv.fairkv.copies`."""
    return "batch" if name.startswith("dp") else "tokens"


def _most_replicas(batch: int) -> int:
    """How many replicas a head may have for any number of them to share the batch evenly."""
    return next(most for most in range(1, batch + 1) if batch % (most + 1))


def _whole_sequences(
    layer: LayerMapping, number: int, budgets: Sequence[int], ranks: int, batch: int
) -> list[list[Piece]]:
    """Copies share the batch, as in the paper and as an engine does it: each sequence is one replica's alone."""
    found: list[list[Piece]] = [[] for _ in range(ranks)]
    for head, of_prompts in enumerate(owners(layer, number)):
        for sequence, rank in enumerate(np.resize(of_prompts, batch).tolist()):
            found[rank].append(Piece(sequence, head, 0, budgets[head]))
    return found


def _parts_of_sequences(
    layer: LayerMapping, budgets: Sequence[int], ranks: int, batch: int, fixed: int
) -> list[list[Piece]]:
    """Copies share every sequence: each attends to a part of the head's tokens."""
    found: list[list[Piece]] = [[] for _ in range(ranks)]
    split = split_request(layer, budgets, ranks, fixed=fixed)
    for head, (held, parts) in enumerate(zip(layer.ranks, split, strict=True)):
        first = 0
        for rank, count in zip(held, parts, strict=True):
            if count:
                found[rank] += [Piece(sequence, head, first, first + count) for sequence in range(batch)]
            first += count
    return found
