"""Ranks of a host divide the bandwidth of its memory (KVPR, A.7): predictions for 1, 2, 4 and 8 processes."""

from dataclasses import replace

import pytest
import torch

from megakv.costmodel.choices import Demand, Fit
from megakv.costmodel.cluster import ClusterPlanner
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.offload import LayerCosts, steady_seconds
from megakv.costmodel.offload_time import CHUNK_TOKENS, divided, layer_costs, offloaded_ttit
from megakv.costmodel.presets import hardware
from megakv.costmodel.shape import LayerShape, ModelShape

KVPR = hardware("a100-pcie4")
BANDWIDTH = 160e9
"""Of its host: eight channels of DDR4-3200, as far as they are reached."""
SHARERS = (1, 2, 4, 8)


def model(kv_heads: int) -> ModelShape:
    shapes = (LayerShape(12 * 4096**2),) * 8
    return ModelShape(4096, 4 * 4096, 32000, 32, kv_heads, 128, 128, shapes, 32000 * 4096, torch.float16)


def costs(kv_heads: int, sharers: int) -> LayerCosts:
    profile = KVPR.spec.model_copy(update={"host_memory_bandwidth": BANDWIDTH}).profile()
    assert profile.host_link is not None
    return layer_costs(profile, profile.host_link, model(kv_heads), device_s=2e-4, sharers=sharers)


@pytest.mark.parametrize("kv_heads", [32, 8])
def test_the_processor_alone_falls_behind_and_the_division_does_not(kv_heads: int) -> None:
    tokens = 32 * 1024
    alone = [steady_seconds(costs(kv_heads, n), tokens, 0, on_host=tokens, chunk=CHUNK_TOKENS) for n in SHARERS]
    both = [divided(costs(kv_heads, n), tokens) for n in SHARERS]
    plain = steady_seconds(costs(kv_heads, 1), tokens, 0, chunk=CHUNK_TOKENS)
    # Eight processes get an eighth each: attending on the host alone ends as slow as any.
    assert alone[3] / alone[0] > 6
    assert both[3].seconds < 0.55 * alone[3]
    assert all(each.seconds <= min(plain * n, time) for each, n, time in zip(both, (1, 1, 1, 2), alone, strict=True))
    hosted = [each.on_host for each in both]
    assert hosted == sorted(hosted, reverse=True) and hosted[0] > hosted[2]
    recomputed = [each.recomputed for each in both]
    assert recomputed == sorted(recomputed) and (recomputed[2] > 0) == (kv_heads == 32)


def test_links_take_from_the_same_memory() -> None:
    few, many = costs(8, 6), costs(8, 8)
    assert few.kv_s == pytest.approx(2 * 8 * 128 * 2 / 26e9, rel=0.01)
    assert many.kv_s == pytest.approx(2 * 8 * 128 * 2 * 8 / BANDWIDTH)


def test_the_planner_divides_by_the_ranks_of_a_host() -> None:
    spec = KVPR.spec.model_copy(update={"host_memory_bandwidth": BANDWIDTH, "memory_bytes": 8 * 10**9})
    times = []
    for gpus in SHARERS:
        demand = Demand(context=1000, cached=199_000, gpus=gpus)
        found = ClusterPlanner(replace(KVPR, spec=spec), model(8)).plan(demand)
        # One replica for each accelerator, each with its own cache behind its own link.
        times.append(
            min(each.ttit_s for each in found.choices if each.fit == Fit(offload=True) and each.mesh.ranks == 1)
        )
    assert times == sorted(times) and times[3] > 1.5 * times[0]
    profile = spec.profile()
    assert profile.host_link is not None
    workload = Workload((1,), (200_000,), 1)
    expected = [
        offloaded_ttit(profile, profile.host_link, model(8), workload, "pass_q", sharers=sharers) for sharers in SHARERS
    ]
    assert times == pytest.approx(expected)
