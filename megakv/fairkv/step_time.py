"""The mappings whose decoding step takes least, by the cost model's seconds.

A head costs a fixed part on every rank that holds it, as its weights are read there, and a part that replicas share. In
tokens, the fixed part is that of so many more: with it, a layer is mapped for every number of copies. Heads in runs of
neighbours are a candidate in each layer, so that nothing found is predicted to be slower; they stay where a whole step
would gain next to nothing. A cap may leave
them out; and with more ranks than KV heads tensor parallelism divides queries, which no mapping does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from megakv.cache.layer import LayerMapping, contiguous_layer
from megakv.cache.splitting import split_heads
from megakv.costmodel.head_times import HeadTimes, LayerCosts, RankWork
from megakv.fairkv.assignment import TOLERANCE
from megakv.fairkv.capacity import CLOSE, Weights, arrange, map_layers, memory_of, relieved
from megakv.fairkv.copy_limits import CopyLimits
from megakv.fairkv.fair_copying import Split, map_layer
from megakv.fairkv.mapping import Regime, StepTime

Price = Callable[[LayerMapping], float]
LEAST_GAIN = 1.02
"""Of a whole step: heads are left alone where less is predicted, which may well be nothing."""
BATCHES = (1, 4, 16, 64, 256)
KEPT = (256, 1024, 4096, 16384, 65536)
"""Regimes: sequences decoded together, and tokens that a head keeps of each, the mean."""


def fastest_layers(
    times: HeadTimes, budgets: Weights, limits: CopyLimits, split: Split, *, cap: float | None = None
) -> tuple[list[LayerMapping], float]:
    """Mappings of all layers, and a bound in seconds that no step is below.

    Ranks are renumbered layer by layer until they hold equally much. With a `cap` of tokens that a rank may keep over
    all layers, of mappings that are within it the fastest; a ValueError if none is found.
    """
    found = [fastest_layer(times, layer, row, limits, split) for layer, row in enumerate(budgets)]
    mappings, size = [mapping for mapping, _ in found], limits.tp_size
    bound = times.beside_s + sum(least for _, least in found)
    plain = [contiguous_layer(len(row), size) for row in budgets]
    most = float("inf") if cap is None else cap * (1 + CLOSE)
    allowed = all(limits.allow(layer.replicas) for layer in plain)
    if allowed and times.step_seconds(plain, budgets) < LEAST_GAIN * times.step_seconds(mappings, budgets):
        mappings = plain
    gained = arrange([mapping for mapping, _ in found], budgets, size, most)
    if mappings != plain:
        mappings = gained
    if cap is None or max(memory_of(mappings, budgets, size)) <= cap:
        return mappings, bound
    others = [relieved(mappings, budgets, size, most), gained]
    if allowed:
        others.append(plain)
    fitting = [each for each in others if max(memory_of(each, budgets, size)) <= most]
    fitting.append(map_layers(budgets, limits, split, memory_cap=cap)[0])
    return min(fitting, key=lambda each: times.step_seconds(each, budgets)), bound


def contiguous_seconds(times: HeadTimes, budgets: Weights) -> float:
    """A step with heads in runs of neighbours, as tensor parallelism has them without a mapping.

    Of more ranks than KV heads each has a part of a head's queries, and reads all of its tokens.
    """
    heads, size = len(budgets[0]), times.tp_size
    if heads >= size:
        return times.step_seconds([contiguous_layer(heads, size)] * len(budgets), budgets)
    group = times.model.heads // heads
    # Of a head's weights those of its key and value, as many as of one query and its output, are on each rank.
    part = (group * heads / size + 1) / (group + 1)
    works = [[RankWork(part, row[rank * heads // size]) for rank in range(size)] for row in budgets]
    return times.beside_s + sum(times.costs(layer).seconds(own) for layer, own in enumerate(works))


def step_time(times: HeadTimes, mappings: Sequence[LayerMapping], budgets: Weights) -> StepTime:
    """What the cost model says of a mapping, and of the same in other regimes."""
    mean = float(np.mean(budgets))
    regimes = []
    for batch in BATCHES:
        of_batch = times.with_batch(batch)
        for kept in KEPT:
            rows = [[weight * kept / mean for weight in row] for row in budgets] if mean else budgets
            gain = contiguous_seconds(of_batch, rows) / of_batch.step_seconds(mappings, rows)
            regimes.append(Regime(batch=batch, kept=kept, gain=gain))
    mapped, contiguous = times.step_seconds(mappings, budgets), contiguous_seconds(times, budgets)
    return StepTime(
        hardware=times.profile.fingerprint.processor,
        batch=times.batch,
        kept=mean,
        seconds=mapped,
        contiguous_seconds=contiguous,
        gain=contiguous / mapped,
        regimes=tuple(regimes),
    )


def fastest_layer(
    times: HeadTimes, layer: int, kept: Sequence[float], limits: CopyLimits, split: Split
) -> tuple[LayerMapping, float]:
    """One layer's mapping, without any copy that does not pay, and a bound in seconds."""
    heads, costs, fixed = len(kept), times.costs(layer), times.head_tokens()[layer]
    price: Price = partial(times.layer_seconds, layer, kept=kept)
    plain = contiguous_layer(heads, limits.tp_size)
    mapping, reached = (plain, price(plain)) if limits.allow(plain.replicas) else (None, float("inf"))
    bound = float("inf")
    for copies in range(max(0, limits.tp_size - heads), limits.most(heads) + 1):
        shared_s = times.shared_s(copies + 1) if copies else 0.0
        level = (1 + costs.jitter) * (sum(kept) + fixed * (heads + copies)) / limits.tp_size
        if (least := _seconds(costs, level, shared_s)) >= reached * (1 - TOLERANCE):
            # From here on, equal ranks would be no faster.
            bound = min(bound, least)
            break
        solution = map_layer(kept, replace(limits, copies=copies), split, fixed=fixed)
        bound = min(bound, _seconds(costs, max(level, solution.bound), shared_s))
        seconds = price(solution.mapping)
        if seconds < reached * (1 - TOLERANCE):
            mapping, reached = solution.mapping, seconds
    assert mapping is not None, "limits leave no mapping: they are checked before"
    return without_idle_copies(mapping, kept, price, fixed, split), min(bound, reached)


def _seconds(costs: LayerCosts, tokens: float, shared_s: float) -> float:
    return max(costs.least_s, costs.alike_s + tokens * costs.token_s + shared_s)


def without_idle_copies(
    mapping: LayerMapping, kept: Sequence[float], price: Price, fixed: float, split: Split
) -> LayerMapping:
    """The same without the replicas that nothing becomes slower without."""
    while True:
        reached = price(mapping) * (1 + TOLERANCE)
        fewer = next((each for each in _fewer(mapping, kept, fixed, split) if price(each) <= reached), None)
        if fewer is None:
            return mapping
        mapping = fewer


def _fewer(mapping: LayerMapping, kept: Sequence[float], fixed: float, split: Split) -> Iterator[LayerMapping]:
    """With one replica less, in every way that leaves each rank a head."""
    size = 1 + max(max(held) for held in mapping.ranks)
    counts = [sum(rank in held for held in mapping.ranks) for rank in range(size)]
    for head, held in enumerate(mapping.ranks):
        for rank in held if len(held) > 1 else ():
            if counts[rank] == 1:
                continue
            ranks = list(mapping.ranks)
            ranks[head] = tuple(other for other in held if other != rank)
            left = LayerMapping.even(ranks)
            free = split == "free"
            yield left.with_shares(split_heads(kept, ranks, size, fixed=fixed)[1]) if free else left
