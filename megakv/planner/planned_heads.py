"""What decoding takes on a planned mesh whose KV heads keep what a profile says, mapped where that is faster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megakv.cache.layer import LayerMapping, contiguous_layer
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.head_times import HeadTimes
from megakv.costmodel.shape import ModelShape
from megakv.fairkv.mapper import map_heads
from megakv.fairkv.mapping import LEAST_GAIN
from megakv.fairkv.profile import BudgetProfile
from megakv.fairkv.rank_memory import RankMemory
from megakv.fairkv.step_time import contiguous_seconds
from megakv.planner.choices import Choice, Demand


def fullest_share(budgets: BudgetProfile, tp_size: int) -> float:
    """What the fullest rank keeps with heads in runs of neighbours, over the mean of all ranks."""
    loads = np.sum(budgets.budgets, axis=0).reshape(min(tp_size, budgets.n_kv_heads), -1).sum(axis=1)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def place_heads(
    choice: Choice, demand: Demand, budgets: BudgetProfile, profile: HardwareProfile, model: ModelShape, room: int
) -> Choice:
    """The same choice with the mapping whose token takes least, where one is predicted to be faster than heads in runs
    and has `room`; its time of a token is that of heads with these budgets in any case.
    """
    size, memory = choice.mesh.tp_size, choice.memory
    kept = budgets.scaled(max(1, round(demand.total * choice.fit.kept_share)), demand.total)
    shared = profile.sum_times(size, shared_memory=True) is not None
    times = HeadTimes(profile, model, tp_size=size, batch=demand.batch, shared_memory=shared)
    if not 1 < size <= kept.n_kv_heads:
        return replace(choice, ttit_s=contiguous_seconds(times, kept.budgets))
    found = map_heads(kept, tp_size=size, times=times)
    assert found.time is not None
    of_rank = RankMemory.in_bytes(kept, size, room, model, demand.batch)

    def held(layers: list[LayerMapping]) -> int:
        assert of_rank.token_bytes is not None
        return round(of_rank.held(layers).sum(axis=1).max() * of_rank.token_bytes)

    # Copies of heads have weights, too.
    more = held(found.layers) - held([contiguous_layer(kept.n_kv_heads, size)] * kept.n_layers)
    choice = replace(choice, ttit_s=found.time.contiguous_seconds, mapping_gain=found.time.gain)
    if found.time.gain <= 1 + LEAST_GAIN or memory.total + more > room:
        return choice
    memory = replace(memory, cache=memory.cache + more)
    return replace(choice, memory=memory, ttit_s=found.time.seconds, mapping=found)
