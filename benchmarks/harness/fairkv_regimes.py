"""Decode steps at a model's true widths, by batch and kept tokens: where a mapping of heads pays, as predicted.

A head costs its weights, too, on each rank that holds it: what is worth it for many tokens is not for few. In every
regime the mapping that the cost model chooses runs against contiguous heads, and against two that only count tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from megakv.costmodel.head_times import HeadTimes
from megakv.costmodel.shape import ModelShape
from megakv.fairkv.mapper import map_heads
from megakv.fairkv.mapping import HeadMapping

from .fairkv_methods import engine_methods, make_engines, predicted_step
from .head_division import Budgets, Division, divide_by, make_mapping, profile_of, skewed_budgets
from .models import DTYPES, model_config
from .options import BY_TOKENS, CHOSEN, CONTIGUOUS
from .profiles import measured_profile
from .ragged_heads import HeadShape, Room, TokenPool
from .sampling import Agreement, measure
from .world import World

Rows = list[dict[str, Any]]


def measure_regimes(arguments: argparse.Namespace, world: World) -> Rows:
    """A row for every regime and method. Every rank must call it."""
    rows: Rows = []
    model = ModelShape.from_config(model_config(arguments), dtype=DTYPES[arguments.dtype])
    profile = measured_profile(world, model, arguments, name=f"{world.size}-wide", tp_size=world.size)
    shared = profile.sum_times(world.size, shared_memory=True) is not None
    for batch, kept in tqdm(arguments.regimes, desc="regimes", unit="regime", disable=world.rank != 0):
        times = HeadTimes(profile, model, tp_size=world.size, batch=batch, shared_memory=shared)
        budgets = skewed_budgets(arguments.layers, arguments.kv_heads, kept, arguments.sigma, arguments.seed)
        # Each rank could decide otherwise by a float's last bit.
        found = world.gather(_mappings(times, budgets, world.size, batch))[0]
        divisions = {name: divide_by(name, budgets, of, ranks=world.size, batch=batch) for name, of in found.items()}
        own = argparse.Namespace(**{**vars(arguments), "batch": batch, "kept": kept})
        rows += _measure(own, world, times, found, divisions)
    return rows


def _mappings(times: HeadTimes, budgets: Budgets, ranks: int, batch: int) -> dict[str, HeadMapping | None]:
    """By method; None: contiguous heads."""
    names = [name for name in BY_TOKENS if ranks > 1]
    by_tokens = {name: make_mapping(name, budgets, ranks=ranks, batch=batch) for name in names}
    return {CONTIGUOUS: None, **by_tokens, CHOSEN: map_heads(profile_of(budgets), tp_size=ranks, times=times)}


def _measure(
    arguments: argparse.Namespace,
    world: World,
    times: HeadTimes,
    mappings: Mapping[str, HeadMapping | None],
    divisions: Mapping[str, Division],
) -> Rows:
    longest = max(max(row) for division in divisions.values() for row in division.budgets)
    shape = HeadShape(arguments.kv_heads, arguments.group, arguments.head_dim, DTYPES[arguments.dtype], world.device)
    pool, room = TokenPool(shape, longest, arguments.seed), Room()
    engines = make_engines(arguments, world, mappings, positions=longest + arguments.tokens + 2)
    methods = engine_methods(arguments, world, list(divisions.values()), engines, pool, room)
    limits = {"repeats": arguments.repeats, "budget_s": arguments.regime_seconds, "least": 3}
    samples = measure(world, methods, Agreement(world, arguments.dtype), **limits)
    room.take(None)
    place = {"part": "regimes", "ranks": world.size, "batch": arguments.batch, "kept": arguments.kept}
    alone = mappings[CHOSEN] is not None and divisions[CHOSEN].pieces == divisions[CONTIGUOUS].pieces
    rows = [
        sample.to_row(
            **place,
            predicted_s=predicted_step(times, division),
            left_alone=division.name == CHOSEN and alone,
            copies=_copies(mappings[division.name]),
            **division.facts(),
        )
        for sample, division in zip(samples, divisions.values(), strict=True)
    ]
    for engine in {id(engine): engine for engine in engines.values()}.values():
        engine.destroy()
    return rows


def _copies(mapping: HeadMapping | None) -> int:
    return 0 if mapping is None else sum(layer.copies for layer in mapping.layers)
