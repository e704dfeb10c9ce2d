"""The mapper: from a budget profile to KV heads on ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import get_args

from megakv.fairkv.capacity import Weights, arrange, check_cap, least_total, map_layers
from megakv.fairkv.fair_copying import CopyLimits, Split
from megakv.fairkv.layer import LayerMapping, barrier_utilisation, busy_rates, contiguous_layer, efficiency
from megakv.fairkv.mapping import Balance, HeadMapping, Objective, by_rank
from megakv.fairkv.profile import BudgetProfile
from megakv.fairkv.requests import imagined_requests, place_for_requests


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
    copies: int = 0,
    split: Split = "free",
    objective: Objective = "barrier",
    memory_cap: float | None = None,
    max_replicas: int | None = None,
    copied_heads: int | None = None,
) -> HeadMapping:
    """Place, and copy, the KV heads of every layer so that the ranks are equally loaded.

    Without copies this is the paper's best-effort assignment (FairKV-NoDP), with them fair-copying (FairKV-DP). A KV
    head and its query heads stay together; ranks may have different numbers of them, and each has one at least.

    Parameters
    ----------
    copies : int
        Extra replicas per layer, at most.
    split : {"free", "even"}
        Whether replicas share a head in any way, or equally.
    objective : {"barrier", "equation4", "requests"}
        ``barrier``: the sum over layers of the slowest rank, each layer ending in an all-reduce; what is left of the
        copies goes where requests unlike the profile need them. ``equation4``: the paper's, the largest sum over layers
        of a rank. ``requests``: the barrier for the profile's single prompts, each with its own split between replicas.
    memory_cap : float, optional
        Tokens that a rank may keep, summed over its KV heads and all layers.
    max_replicas : int, optional
        R_max: replicas of one head.
    copied_heads : int, optional
        CH: heads per layer with more than one replica.

    Raises
    ------
    ValueError
        If a setting is impossible for the profile, or no mapping within the cap was found: names it and what would do.
    """
    limits = CopyLimits(tp_size, copies, max_replicas, copied_heads)
    limits.check(profile.n_kv_heads)
    for name, value, allowed in (("split", split, get_args(Split)), ("objective", objective, get_args(Objective))):
        if value not in allowed:
            raise ValueError(f"{name} = {value!r}: allowed: {', '.join(allowed)}")
    if memory_cap is not None and not (math.isfinite(memory_cap) and memory_cap > 0):
        raise ValueError(f"memory_cap = {memory_cap}: allowed: tokens per rank, above 0")
    if objective == "requests":
        if profile.prompts is None:
            raise ValueError("objective = 'requests': the profile has no budgets of single prompts (prompts)")
        if split != "free":
            raise ValueError(f"objective = 'requests': split = {split!r} leaves requests nothing to decide; use 'free'")
        if memory_cap is not None:
            raise ValueError("objective = 'requests' knows no memory_cap; use objective = 'barrier'")
    budgets = profile.budgets
    if objective == "equation4":
        solution = least_total(budgets, limits, split)
        layers, bound = solution.mappings, solution.bound
        check_cap(memory_cap, solution, tp_size)
    else:
        layers, bound = map_layers(budgets, limits, split, memory_cap=memory_cap)
        if split == "free" and memory_cap is None:
            layers = _placed_for_requests(profile, layers, limits, objective)
    found = balance(layers, budgets, tp_size)
    static = balance([contiguous_layer(profile.n_kv_heads, tp_size)] * len(budgets), budgets, tp_size)
    return HeadMapping(
        **found.model_dump(),
        model=profile.model,
        **asdict(limits),
        n_kv_heads=profile.n_kv_heads,
        split=split,
        objective=objective,
        memory_cap=memory_cap,
        mapping=tuple(by_rank(layer, tp_size) for layer in layers),
        bound=0.0 if objective == "requests" else bound,
        contiguous=static,
        identity=profile.identity,
    )


def _placed_for_requests(
    profile: BudgetProfile, layers: Sequence[LayerMapping], limits: CopyLimits, objective: Objective
) -> list[LayerMapping]:
    """Copies that the profile leaves, or for the objective ``requests`` all, where single requests need them."""
    keep = objective == "barrier"
    if keep and limits.most(profile.n_kv_heads) < limits.tp_size - 1 or limits.tp_size == 1:
        return list(layers)
    placed = []
    for number, (layer, row) in enumerate(zip(layers, profile.budgets, strict=True)):
        prompts = [prompt[number] for prompt in profile.prompts or ()]
        placed.append(place_for_requests(layer, row, prompts or imagined_requests(row), limits, keep_profile=keep))
    return arrange(placed, profile.budgets, limits.tp_size)
