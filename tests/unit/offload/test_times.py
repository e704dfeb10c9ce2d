"""Predicted times with keys, values and weights behind the host link: never below what the link must carry.

Ranks of a host divide the bandwidth of its memory (KVPR, A.7): predictions for 1, 2, 4 and 8 processes.
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import OPTConfig

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.shape import LayerShape, ModelShape
from megakv.offload.method import steady_split
from megakv.offload.prices import GroupPrices, LayerPrices
from megakv.offload.times import (
    layer_prices,
    layer_weight_bytes,
    moved_seconds,
    offloaded_step,
    seen_tokens,
)

PROFILE = PRESETS["a100-pcie4"].profile(cp_size=1)
LINK = PRESETS["a100-pcie4"].host.curve()
MODEL = ModelShape.from_config(
    OPTConfig(num_hidden_layers=8, hidden_size=2048, ffn_dim=8192, num_attention_heads=16, word_embed_proj_dim=2048),
    dtype=torch.float16,
)


def ttit(batch: int, tokens: int, profile: HardwareProfile = PROFILE, **how: object) -> float:
    step = Workload((1,) * batch, (tokens,) * batch, 1)
    return offloaded_step(profile, LINK, MODEL, step, "pass_q", **how).seconds  # type: ignore[arg-type]


def test_a_step_is_as_long_as_its_transfers() -> None:
    batch, tokens = random.randint(2, 9), random.randint(500, 3000)
    cache = 8 * batch * (tokens + 1) * 2 * 2048 * 2
    weights = 8 * layer_weight_bytes(MODEL)
    assert weights == pytest.approx(8 * 12 * 2048**2 * 2, rel=0.01)
    resident = ttit_seconds(PROFILE, MODEL, Workload((1,) * batch, (tokens,) * batch, 1), "pass_q")
    assert cache / LINK.bandwidth < ttit(batch, tokens, plan="stream") < cache / LINK.bandwidth + resident + 1e-2
    assert ttit(batch, tokens, plan="stream", weights=True) > (cache + weights) / LINK.bandwidth


def test_auto_is_the_fastest_plan() -> None:
    batch, tokens = random.randint(4, 32), random.randint(200, 2000)
    plans = {name: ttit(batch, tokens, plan=name) for name in ("stream", "kvpr", "chunked")}
    assert ttit(batch, tokens) == min(plans.values())
    # Activations are half of keys and values here: recomputing some pays on an accelerator that reaches its peak.
    fast = PROFILE.model_copy(update={"recompute_flops": None, "launch_s": 0.0})
    assert ttit(batch, tokens, fast, plan="kvpr") < ttit(batch, tokens, fast, plan="stream")


def test_recomputation_is_as_fast_as_the_machine_says() -> None:
    flops = random.uniform(1e12, 1e14)
    known = layer_prices(PROFILE.model_copy(update={"recompute_flops": flops}), LINK, MODEL)
    assert known.recompute_s == pytest.approx(4 * 2048**2 / flops)
    unknown = layer_prices(PROFILE.model_copy(update={"recompute_flops": None}), LINK, MODEL)
    assert unknown.recompute_s == pytest.approx(4 * 2048**2 / PROFILE.matmul_flops)


def test_groups_share_the_weights() -> None:
    """A step of four groups brings the weights once; four steps of one group bring them four times."""
    tokens = random.randint(100, 400)
    together, apart = ttit(16, tokens, weights=True, groups=4), ttit(4, tokens, weights=True)
    assert together < 0.6 * 4 * apart
    assert ttit(3, tokens, weights=True, groups=8) == ttit(3, tokens, weights=True, groups=3)


def test_windows_leave_tokens_out() -> None:
    batch, tokens, window = random.randint(2, 9), random.randint(2000, 6000), random.randint(100, 1000)
    layers = tuple(replace(layer, window=window if index % 4 else None) for index, layer in enumerate(MODEL.layers))
    model, step = replace(MODEL, layers=layers), Workload((1,) * batch, (tokens,) * batch, 1)
    seen = batch * (2 * (tokens + 1) + 6 * window)
    assert seen_tokens(model, step) == -(-seen // 8) and seen_tokens(MODEL, step) == batch * (tokens + 1)
    seconds = offloaded_step(PROFILE, LINK, model, step, "pass_q", plan="stream").seconds
    sent = seen * 2 * 2048 * 2 / LINK.bandwidth
    assert sent < seconds < sent + ttit_seconds(PROFILE, model, step, "pass_q") + 1e-2


def test_rows_on_disk_come_no_faster_than_it_reads() -> None:
    batch, tokens, disk = random.randint(2, 9), random.randint(2000, 6000), 2e9
    slow = PROFILE.model_copy(update={"disk_bandwidth": disk})
    step = Workload((1,) * batch, (tokens,) * batch, 1)
    cache = 8 * batch * (tokens + 1) * 2 * 2048 * 2

    def seconds(memory: float, plan: str = "stream") -> float:
        return offloaded_step(slow, LINK, MODEL, step, "pass_q", plan=plan, memory_bytes=int(memory)).seconds

    # Keys and values, and activations, half as large.
    assert seconds(2 * cache) == pytest.approx(ttit(batch, tokens, plan="stream"))
    assert seconds(2 * cache, "auto") == pytest.approx(ttit(batch, tokens))
    half = cache / 2 / LINK.bandwidth + cache / 2 / disk
    assert half < seconds(cache / 2) < half + ttit(batch, tokens, plan="stream") - cache / LINK.bandwidth + 1e-3
    shares = [seconds(share * cache, "auto") for share in (0.1, 0.4, 0.8, 1.2, 2.0)]
    # What is divided are whole tokens: from the best fraction of one, a layer is off by a row from disk at most.
    row_s = 2 * 2048 * 2 / disk
    assert all(more <= less * (1 + 1e-9) + 8 * row_s for less, more in pairwise(shares))
    for share in (0.3, 0.7):
        plans = [seconds(share * cache, plan) for plan in ("stream", "kvpr", "chunked")]
        assert seconds(share * cache, "auto") <= min(plans) * (1 + 1e-9)


def test_a_prompt_moves_keys_out_and_weights_in() -> None:
    tokens = random.randint(1000, 9000)
    out = 8 * LINK.at(tokens * 2 * 2048 * 2)
    assert moved_seconds(LINK, MODEL, tokens) == pytest.approx(out)
    into = 8 * LINK.at(layer_weight_bytes(MODEL))
    assert moved_seconds(LINK, MODEL, tokens, weights=True) == pytest.approx(max(out, into))


SHARERS = (1, 2, 4, 8)
BANDWIDTH = 160e9
"""Of the host's memory: eight channels of DDR4-3200, as far as they are reached."""
SHARED = PRESETS["a100-pcie4"].model_copy(update={"host_memory_bandwidth": BANDWIDTH}).profile(cp_size=1)


def model(kv_heads: int) -> ModelShape:
    shapes = (LayerShape(12 * 4096**2),) * 8
    return ModelShape(4096, 4 * 4096, 32000, 32, kv_heads, 128, 128, shapes, 32000 * 4096, torch.float16)


def costs(kv_heads: int, sharers: int) -> LayerPrices:
    return layer_prices(SHARED, LINK, model(kv_heads), device_s=2e-4, sharers=sharers)


@pytest.mark.parametrize("kv_heads", [32, 8])
def test_the_processor_alone_falls_behind_and_the_division_does_not(kv_heads: int) -> None:
    tokens = 32 * 1024
    groups = [GroupPrices(costs(kv_heads, n), tokens, tokens, tokens) for n in SHARERS]
    both = [steady_split(each, recompute=True, host=True) for each in groups]
    seconds = [each.steady_seconds(split.recomputed, split.on_host) for each, split in zip(groups, both, strict=True)]
    alone, plain = [each.steady_seconds(0, tokens) for each in groups], groups[0].steady_seconds(0)
    # Eight processes get an eighth each.
    assert alone[3] / alone[0] > 6 and seconds[3] < 0.55 * alone[3]
    assert all(each <= min(plain * n, time) for each, n, time in zip(seconds, (1, 1, 1, 2), alone, strict=True))
    hosted = [each.on_host for each in both]
    assert hosted == sorted(hosted, reverse=True) and hosted[0] > hosted[2]
    # An accelerator waits for the host when it has recomputed: the better of both ways takes all.
    assert all(each.recomputed == 0 or each.on_host == 0 for each in both)


def test_links_take_from_the_same_memory() -> None:
    row = 2 * 8 * 128 * 2
    assert costs(8, 6).kv_s == pytest.approx(row / LINK.bandwidth)
    assert costs(8, 8).kv_s == pytest.approx(row * 8 / BANDWIDTH)


def test_the_host_makes_steps_shorter_the_fewer_share_it() -> None:
    step = Workload((1,), (200_000,), 1)
    times = [offloaded_step(SHARED, LINK, model(8), step, "pass_q", sharers=sharers).seconds for sharers in SHARERS]
    without = offloaded_step(PROFILE, LINK, model(8), step, "pass_q").seconds
    assert times == sorted(times) and times[0] < 0.25 * without and times[2] < without
