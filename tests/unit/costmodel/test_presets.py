"""A data sheet makes a profile that every prediction works with, and its numbers come out again."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.dense import all_reduce_seconds
from megakv.costmodel.kernels import Kernels
from megakv.costmodel.machine_spec import machine_of
from megakv.costmodel.memory import grown_bytes, rank_memory
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.presets import PRESETS, hardware
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.runahead.chain_search import best_partition
from tests.unit.costmodel.profiles import ideal

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
LLAMA3_405B = ModelShape.from_config(
    LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    dtype=torch.bfloat16,
).with_fp8_feed_forward()


@pytest.mark.parametrize("name", PRESETS)
def test_every_prediction_works_with_a_preset(name: str) -> None:
    machine = hardware(name)
    model = ModelShape.from_config(LlamaConfig(num_hidden_layers=2), dtype=getattr(torch, machine.spec.dtype))
    new, cached, size = random.randint(64, 4000), random.randint(0, 1000), random.randint(2, 6)
    profile = machine.on_mesh(cp_size=size, tp_size=2)
    times = PrefillTimes(profile, model, Workload((new,), (cached,), size), tp_size=2)
    partition = best_partition(profile, model, new, size, cached=cached, tp_size=2)
    for method in ("runahead", "pass_kv", "pass_q", "all_gather", "tsp", "tsp_causal"):
        assert 0 < times.seconds(method, (partition,)) < 1000
    for method in ("pass_q", "replicated"):
        assert 0 < ttit_seconds(profile, model, Workload((1, 1), (new, 7), size), method, tp_size=2) < 10


def test_a_preset_reaches_what_its_data_sheet_says() -> None:
    spec = PRESETS["h100-rdma"]
    profile = spec.profile(cp_size=2, tp_size=8)
    assert profile.matmul_flops == pytest.approx(spec.peak_flops * spec.matmul_efficiency)
    assert profile.exchange.bandwidth == pytest.approx(spec.between.bandwidth)
    assert profile.matmul.at(1) == pytest.approx(2 / (spec.memory_bandwidth * spec.memory_efficiency))
    kernels = Kernels(profile, AttentionShape(16, 1, 128, 128, 2))
    rows, keys = 50_000, 70_000
    flops = 4 * 16 * 128 * rows * keys / kernels.block(rows, keys)
    assert flops == pytest.approx(spec.peak_flops * spec.attention_efficiency, rel=0.01)
    # Half of a causal square is skipped.
    assert kernels.square(rows) == pytest.approx(kernels.block(rows, rows) / 2, rel=0.01)
    # One row reads one KV head's keys and values, once for all heads that share them.
    one = (kernels.block(1, keys) - spec.kernel_s) * spec.memory_bandwidth * spec.memory_efficiency
    assert one == pytest.approx(keys * 2 * 128 * 2, rel=0.01)


def test_presets_are_what_the_papers_times_say() -> None:
    """Plans and simulations start from the constants that benchmarks/validate_papers.py found."""
    found = json.loads((RESULTS / "validate_papers.json").read_text())["summary"]["constants"]
    h100, a100 = PRESETS["h100-rdma"], PRESETS["a100-nvlink"]
    rings, chains, link = found["context_parallel"], found["runahead"], found["kvpr_a100"]
    for name in ("matmul_efficiency", "attention_efficiency", "memory_efficiency", "step_s", "collective_s"):
        assert getattr(h100, name) == pytest.approx(rings[name], rel=0.01), name
    assert h100.between.bandwidth == pytest.approx(rings["between_bandwidth"], rel=0.01)
    assert h100.between.latency_s == pytest.approx(rings["between_latency_s"], rel=0.01)
    assert h100.between.collective_bandwidth == pytest.approx(rings["collective_bandwidth"], rel=0.01)
    for name in ("matmul_efficiency", "launch_s"):
        assert getattr(a100, name) == pytest.approx(chains[name], rel=0.01), name
    for spec in (a100, PRESETS["a100-pcie4"]):
        assert spec.profile().recompute_flops == pytest.approx(link["recompute_flops"], rel=0.01)
        assert spec.host.bandwidth == pytest.approx(link["link_bytes_s"], rel=0.01)


def test_a_ring_inside_a_host_has_the_links_inside() -> None:
    spec = PRESETS["h100-rdma"]
    assert spec.profile(cp_size=4, tp_size=2).exchange.bandwidth == pytest.approx(spec.inside.bandwidth)
    assert spec.profile(cp_size=4, tp_size=4).exchange.bandwidth == pytest.approx(spec.between.bandwidth)
    with pytest.raises(ValueError, match="tp_size = 0"):
        spec.profile(tp_size=0)


def test_collectives_between_hosts_fill_the_link() -> None:
    spec = PRESETS["h100-rdma"]
    apart, together = spec.profile(cp_size=4, tp_size=8), spec.profile(cp_size=2, tp_size=2)
    assert spec.between.collective_bandwidth == pytest.approx(apart.all_to_all.bandwidth)
    assert apart.exchange.bandwidth < apart.all_to_all.bandwidth == pytest.approx(apart.all_gather.bandwidth)
    assert together.all_to_all.bandwidth == pytest.approx(spec.inside.bandwidth)
    assert apart.all_to_all.latency == pytest.approx(spec.between.latency_s + spec.collective_s, rel=1e-3)
    # A sum over hosts is such a collective, too.
    slow = apart.model_copy(update={"exchange_collective": None})
    assert all_reduce_seconds(apart, 1e9, 64) < 0.7 * all_reduce_seconds(slow, 1e9, 64)


def test_accelerators_share_the_memory_of_their_host() -> None:
    spec = PRESETS["h100-rdma"]
    assert [spec.host_share(count) for count in (1, 3, 64)] == [2000 * 10**9, 2000 * 10**9 // 3, 250 * 10**9]
    assert spec.model_copy(update={"host_memory_bytes": None}).host_share(4) is None


def test_the_memory_of_405b() -> None:
    memory = rank_memory(LLAMA3_405B, context=1_000_000, cp_size=16, tp_size=8)
    # FP8 feed-forward weights: 330 billion of one byte, 76 billion of two; of those, embeddings and head are whole.
    assert memory.weights == pytest.approx((329.7e9 + 2 * 71.9e9) / 8 + 2 * 4.2e9, rel=0.01)
    assert memory.cache == 126 * 62_500 * 2 * 128 * 2
    assert memory.total < PRESETS["h100-rdma"].memory_bytes
    half = rank_memory(LLAMA3_405B, context=1_000_000, cp_size=16, tp_size=8, kept_share=0.5, new=4096)
    # Of a layer that is compressed next, all tokens that are computed at a time are there: 4,096 over 16 ranks.
    assert half.cache == memory.cache // 2 + 4096 // 16 * 2 * 128 * 2 and half.working < memory.working
    away = rank_memory(LLAMA3_405B, context=1_000_000, cp_size=16, tp_size=8, offloaded=True)
    assert away.cache == 2 * grown_bytes(memory.cache // 126)
    # With as many KV heads as query heads activations come beside them: half as wide.
    wide = replace(LLAMA3_405B, kv_heads=128)
    away = rank_memory(wide, context=1000, offloaded=True)
    assert away.cache == 2 * grown_bytes(1000 * 3 * 16384 * 2)


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="hardware = 'h100-rmda'.*did you mean 'h100-rdma'"):
        hardware("h100-rmda")
    with pytest.raises(ValueError, match="machine = 'xyzzy'.*known: h100-rdma"):
        hardware("xyzzy", setting="machine")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    PRESETS["cpu"].save(path)
    assert hardware(path).spec == PRESETS["cpu"]
    values = json.loads(path.read_text()) | {"memory_bytes": -1}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="memory_bytes"):
        hardware(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="hardware profile"):
        hardware(path)


def test_a_measured_profile_is_used_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    measured = PRESETS["cpu"].profile(cp_size=3).model_copy(update={"memory_bytes": 123, "host_memory_bytes": 456})
    measured.save(path)
    machine = hardware(path)
    assert machine.on_mesh(cp_size=5, tp_size=7) == measured
    assert (machine.spec.memory_bytes, machine.spec.host_memory_bytes) == (123, 456)
    with pytest.raises(ValueError, match="memory_bytes"):
        machine_of(ideal())


def test_a_window_bounds_what_a_layer_holds() -> None:
    """But for one layer at a time, which has a prompt's rows all there; in pieces, each layer has one piece more."""
    layers = tuple(replace(layer, window=4096) for layer in LLAMA3_405B.layers)
    model, row = replace(LLAMA3_405B, layers=layers), LLAMA3_405B.attention(tp_size=1).kv_row_bytes
    held, count = 4096 + 2 * 64, len(layers)
    assert rank_memory(model, context=100_000).cache == row * ((count - 1) * held + 100_000)
    assert rank_memory(model, context=100_000, new=1000).cache == row * count * (held + 1000)
    assert rank_memory(model, context=1000, batch=3) == rank_memory(LLAMA3_405B, context=1000, batch=3)
    offloaded = [rank_memory(each, context=100_000, offloaded=True).host for each in (model, LLAMA3_405B)]
    assert offloaded[0] < 0.1 * offloaded[1]
