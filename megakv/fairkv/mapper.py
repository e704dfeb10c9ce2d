"""The mapper: from a budget profile to KV heads on ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import get_args

from megakv.base.loads import barrier_utilisation, busy_rates, efficiency
from megakv.cache.layer import LayerMapping, contiguous_layer
from megakv.costmodel.head_times import HeadTimes
from megakv.fairkv.capacity import Weights, arrange, check_cap, least_total, level_layers, map_layers
from megakv.fairkv.copy_limits import CopyLimits
from megakv.fairkv.fair_copying import Split
from megakv.fairkv.mapping import Balance, HeadMapping, Objective, by_rank
from megakv.fairkv.profile import BudgetProfile
from megakv.fairkv.rank_memory import RankMemory
from megakv.fairkv.requests import imagined_requests, place_for_requests
from megakv.fairkv.step_time import fastest_layers, step_time


def balance(layers: Sequence[LayerMapping], budgets: Weights, tp_size: int) -> Balance:
    """Under budgets ``[layers][heads]``."""
    loads = [m.loads(row, tp_size) for m, row in zip(layers, budgets, strict=True)]
    return Balance(
        barrier_utilisation=min(1.0, barrier_utilisation(loads)),
        efficiency=min(1.0, efficiency(loads)),
        loads=tuple(map(tuple, loads)),
        rank_loads=tuple(sum(column) for column in zip(*loads, strict=True)),
        busy_rates=tuple(min(1.0, rate) for rate in busy_rates(loads)),
    )


def map_heads(
    profile: BudgetProfile,
    *,
    tp_size: int,
    copies: int | None = None,
    split: Split = "free",
    objective: Objective | None = None,
    times: HeadTimes | None = None,
    memory_cap: float | None = None,
    memory_cap_bytes: float | None = None,
    max_replicas: int | None = None,
    copied_heads: int | None = None,
) -> HeadMapping:
    """Place, and copy, the KV heads of every layer so that the ranks are equally loaded.

    Without copies this is the paper's best-effort assignment (FairKV-NoDP), with them fair-copying (FairKV-DP). A KV
    head and its query heads stay together; ranks may have different numbers of them, and each has one at least.

    Parameters
    ----------
    copies : int, optional
        Extra replicas per layer, at most. None: for the objective ``time`` as many as pay, else none.
    split : {"free", "even"}
        Whether replicas share a head in any way, or equally.
    objective : {"time", "barrier", "equation4", "algorithm2"}, optional
        ``time``, the default with `times`: predicted seconds of a decoding step, in which every head costs its weights
        on each rank that holds it, too; without a cap never slower than contiguous heads, where there are as many as
        ranks, and without copies that do not pay.
        ``barrier``, the default otherwise: the sum over layers of the slowest rank's tokens, each layer ending in an
        all-reduce; what is left of the copies goes where requests unlike the profile need them. ``equation4``: the
        paper's, the largest sum over layers of a rank. ``algorithm2``: what the paper's listing picks by, in every
        layer the smallest difference between the fullest rank and the emptiest; replicas share a head equally.
    times : HeadTimes, optional
        What predicts a step of the model on the machine; with another objective, it is only reported.
    memory_cap : float, optional
        Tokens of one sequence that a rank may keep, summed over its KV heads and all layers, in the worst of the
        profile's prompts; of the mean where it has none.
    memory_cap_bytes : float, optional
        The same in bytes, for the batch of `times`, with the weights of the rank's KV heads, copies included.
    max_replicas : int, optional
        R_max: replicas of one head.
    copied_heads : int, optional
        CH: heads per layer with more than one replica.

    Raises
    ------
    ValueError
        If a setting is impossible for the profile, or no mapping within the cap was found: names it and what would do.
    """
    objective = objective or ("barrier" if times is None else "time")
    if copies is None:
        copies = max(0, tp_size - 1) if objective == "time" else 0
    limits = CopyLimits(tp_size, copies, max_replicas, copied_heads)
    limits.check(profile.n_kv_heads)
    for name, value, allowed in (("split", split, get_args(Split)), ("objective", objective, get_args(Objective))):
        if value not in allowed:
            raise ValueError(f"{name} = {value!r}: allowed: {', '.join(allowed)}")
    _check_times(profile, tp_size, objective, times)
    head_tokens = None if times is None or objective != "time" else times.head_tokens()
    memory = _memory(profile, tp_size, times, memory_cap, memory_cap_bytes)
    if memory is not None and head_tokens is not None:
        memory = replace(memory, fixed=head_tokens)
    if objective == "algorithm2" and split == "free" and copies:
        raise ValueError(
            "objective = 'algorithm2': split = 'free', but Algorithm 2 divides a head's tokens equally; use 'even'"
        )
    if objective == "algorithm2" and memory is not None:
        raise ValueError(f"objective = {objective!r} knows no memory_cap; use objective = 'barrier'")
    budgets = profile.budgets

    def mapped(cap: float | None) -> tuple[list[LayerMapping], float]:
        if objective == "time":
            assert times is not None
            return fastest_layers(times, budgets, limits, split, cap=cap)
        if objective == "algorithm2":
            return level_layers(budgets, limits)
        if objective == "equation4":
            solution = least_total(budgets, limits, split)
            check_cap(cap, solution, tp_size)
            return solution.mappings, solution.bound
        return map_layers(budgets, limits, split, memory_cap=cap)

    plain = [contiguous_layer(profile.n_kv_heads, tp_size)] * profile.n_layers
    fallback = plain if limits.allow(plain[0].replicas) else None
    if memory is None:
        layers, bound = mapped(None)
    else:
        try:
            layers, bound = memory.within(mapped, fallback)
        except ValueError:
            if head_tokens is None:
                raise
            # Divided by tokens alone, what requests keep takes the ranks less room; and less again in mappings that
            # level tokens, whatever they cost.
            head_tokens, memory = None, replace(memory, fixed=())
            try:
                layers, bound = memory.within(mapped, fallback)
            except ValueError:
                bound = mapped(None)[1]
                layers, _ = memory.within(lambda cap: map_layers(budgets, limits, split, memory_cap=cap), fallback)
    if objective == "barrier" and split == "free" and memory is None:
        layers = _placed_for_requests(profile, layers, limits)
    found = balance(layers, budgets, tp_size)
    static = balance(plain, budgets, tp_size)
    return HeadMapping(
        **found.model_dump(),
        model=profile.model,
        **asdict(limits),
        n_kv_heads=profile.n_kv_heads,
        split=split,
        objective=objective,
        memory_cap=memory_cap,
        memory_cap_bytes=memory_cap_bytes,
        mapping=tuple(by_rank(layer, tp_size) for layer in layers),
        head_tokens=head_tokens,
        bound=bound,
        contiguous=static,
        time=None if times is None else step_time(times, layers, budgets),
        identity=profile.identity,
    )


def _check_times(profile: BudgetProfile, tp_size: int, objective: Objective, times: HeadTimes | None) -> None:
    if times is None:
        if objective == "time":
            raise ValueError("objective = 'time' needs what predicts a step (times, --hardware); or use 'barrier'")
        return
    if times.tp_size != tp_size:
        raise ValueError(f"times are of {times.tp_size} ranks, not of tp_size = {tp_size}")
    times.check(profile.n_layers, profile.n_kv_heads)


def _memory(
    profile: BudgetProfile, tp_size: int, times: HeadTimes | None, tokens: float | None, nbytes: float | None
) -> RankMemory | None:
    """The cap that was given, if one was."""
    given = {"memory_cap": (tokens, "tokens per rank"), "memory_cap_bytes": (nbytes, "bytes per rank")}
    for name, (value, unit) in given.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} = {value}: allowed: {unit}, above 0")
    if nbytes is None:
        return None if tokens is None else RankMemory.in_tokens(profile, tp_size, tokens)
    if tokens is not None:
        raise ValueError(f"memory_cap = {tokens:g} and memory_cap_bytes = {nbytes:g}: give one of them")
    if times is None:
        raise ValueError("memory_cap_bytes needs the model's sizes (times, --hardware); or use memory_cap")
    return RankMemory.in_bytes(profile, tp_size, nbytes, times.model, times.batch)


def _placed_for_requests(
    profile: BudgetProfile, layers: Sequence[LayerMapping], limits: CopyLimits
) -> list[LayerMapping]:
    """Copies that the profile leaves, where single requests need them."""
    if limits.most(profile.n_kv_heads) < limits.tp_size - 1 or limits.tp_size == 1:
        return list(layers)
    placed = []
    for number, (layer, row) in enumerate(zip(layers, profile.budgets, strict=True)):
        prompts = [prompt[number] for prompt in profile.prompts or ()]
        placed.append(place_for_requests(layer, row, prompts or imagined_requests(row), limits))
    return arrange(placed, profile.budgets, limits.tp_size)
