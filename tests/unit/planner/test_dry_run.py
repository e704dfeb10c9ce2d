"""A dry run counts what loading really keeps, and refuses what loading or a pass would refuse."""

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from megakv.attention.partial import Scoring
from megakv.base.errors import MegaKVError
from megakv.costmodel.memory import grown_bytes
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.shape import ModelShape
from megakv.engine.config import load_config
from megakv.engine.loading import build_model, empty_model
from megakv.fairkv.mapper import map_heads
from megakv.fairkv.mapping import load_mapping
from megakv.fairkv.placement import place_heads
from megakv.fairkv.profile import BudgetProfile
from megakv.launcher.command import main
from megakv.offload.config import OffloadConfig
from megakv.planner.dry_run import dry_run
from megakv.planner.dry_run.coverage import check_coverage
from megakv.planner.dry_run.run import VirtualRank, token_counts
from megakv.planner.dry_run.share import ShapeRuntime, run_shapes
from megakv.weights.placement import WHOLE, SliceSpec, contiguous_head_map, head_counts, plan_placement
from tests.families import FAMILIES, llama, llama_mha, opt
from tests.gguf_files import config_of


def saved(config: PreTrainedConfig, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


def settings(cp: int = 1, tp: int = 1, **section: Any) -> dict[str, Any]:
    return {
        "dtype": "bf16",
        "tensor_parallel": {"tp_size": tp},
        "megakv": {"context_parallel": {"size": cp, **section.pop("context_parallel", {})}, **section},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_loading_keeps(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    folder = saved(config, tmp_path)
    for tp in (1, 2):
        try:
            loaded = [
                build_model(
                    folder, dtype=torch.float32, load="random", tp_rank=rank, tp_size=tp, all_reduce=lambda t: t
                ).bytes_kept
                for rank in range(tp)
            ]
        except ValueError as error:
            with pytest.raises(ValueError) as caught:
                dry_run(folder, {**settings(tp=tp), "dtype": "fp32"}, context=33)
            assert str(caught.value) == str(error)
            continue
        found = dry_run(folder, {**settings(cp=2, tp=tp), "dtype": "fp32"}, context=33)
        assert [rank.weight_bytes for rank in found.ranks] == loaded * 2
        assert [(rank.cp_rank, rank.tp_rank) for rank in found.ranks] == [(c, t) for c in range(2) for t in range(tp)]
        assert sum(rank.tokens for rank in found.ranks) == 33 * tp


@pytest.mark.parametrize("weights", ["int8", "q4_1"])
def test_blocks_are_those_that_loading_keeps(weights: str, tmp_path: Path) -> None:
    folder = saved(config_of("qwen2"), tmp_path)
    for rank in range(2):
        loaded = build_model(
            folder, dtype=torch.bfloat16, load="random", weights=weights, tp_rank=rank, tp_size=2,
            all_reduce=lambda t: t,
        )  # fmt: skip
        found = dry_run(folder, settings(tp=2, weights={"format": weights}), context=9).ranks[rank]
        assert found.weight_bytes == loaded.bytes_kept


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_fp8_weights_are_those_that_loading_keeps(family: str, tmp_path: Path) -> None:
    folder = saved(FAMILIES[family](), tmp_path)
    offload = {"enabled": True, "weights": True, "host_gb": 0.05}
    for rank in range(2):
        loaded = build_model(
            folder, dtype=torch.bfloat16, load="random", weights="fp8", tp_rank=rank, tp_size=2,
            all_reduce=lambda t: t, offload=OffloadConfig(**offload),
        )  # fmt: skip
        resident, offloaded = (
            dry_run(folder, settings(tp=2, weights={"format": "fp8"}, **more), context=9).ranks[rank]
            for more in ({}, {"offload": offload})
        )
        assert resident.weight_bytes == loaded.bytes_kept
        assert loaded.layer_weights is not None and offloaded.host_weight_bytes == loaded.layer_weights.nbytes


def test_keys_and_values_are_counted_row_by_row(tmp_path: Path) -> None:
    config = llama(num_key_value_heads=2)
    folder = saved(config, tmp_path)
    found = dry_run(folder, settings(cp=2, tp=4), context=51, batch=3, new_tokens=5)
    shape = ModelShape.from_config(copy.deepcopy(config), dtype=torch.bfloat16).attention(tp_size=4)
    row = shape.kv_row_bytes * config.num_hidden_layers
    assert [rank.kept for rank in found.ranks] == [78] * 4 + [75] * 4
    # Three of five generated tokens of a sequence at most are on one of two ranks.
    assert [rank.kv_bytes for rank in found.ranks] == [row * (78 + 9)] * 4 + [row * (75 + 9)] * 4
    last = settings(cp=2, context_parallel={"prefill": "runahead"}, runahead={"kv": "last", "partition": [0.75, 0.25]})
    first, second = dry_run(folder, last, context=40).ranks
    assert (first.tokens, first.kept, first.kv_bytes) == (30, 0, 0)
    assert (second.tokens, second.kept) == (10, 40)


def test_compressed_and_offloaded_caches(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path)
    dense = dry_run(folder, settings(), context=1000).ranks[0].kv_bytes
    layers = llama().num_hidden_layers
    kept = dry_run(folder, settings(fairkv={"budget": 0.25}), context=1000).ranks[0].kv_bytes
    assert kept == dense // 4 + dense // layers
    # No more tokens than the budget: nothing is compressed.
    assert dry_run(folder, settings(fairkv={"budget": 1000}), context=1000).ranks[0].kv_bytes == dense
    small = {"enabled": True, "method": "stream", "host_gb": dense / (1 << 30), "page_kib": 4}
    away = dry_run(folder, settings(offload=small), context=1000)
    assert "megakv.offload.host_gb" in str(away.problem)
    both = dry_run(folder, settings(offload=small, fairkv={"budget": 0.25}), context=1000)
    # In whole pages; on the accelerator, buffers, and one layer that compression has not chosen from yet.
    assert both.problem is None and dense / 4 <= both.ranks[0].host_bytes <= dense / 4 + layers * 4096
    assert both.ranks[0].kv_bytes == 2 * grown_bytes(dense // layers // 4) + dense // layers


def test_layouts_are_the_engines() -> None:
    assert token_counts(load_config(settings(cp=3)), 7, 2) == ([6, 4, 4], [6, 4, 4])
    chain = settings(cp=2, context_parallel={"prefill": "runahead"}, runahead={"partition": [5, 2]})
    assert token_counts(load_config(chain), 7, 1) == ([5, 2], [5, 2])
    with pytest.raises(ValueError, match="sums to 7 tokens, but a sequence of the prompt has 8"):
        token_counts(load_config(chain), 8, 1)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (settings(tp=3), {"context": 9}, "tensor_parallel.tp_size = 3 cannot split 8 query heads over 4 KV heads"),
        (settings(), {"context": 5000}, "the prompt has 5000 tokens but the model has positions for 4096"),
        (settings(), {"context": 0}, "context = 0: allowed: 1 to 16777216 tokens"),
        (settings(), {"context": 9, "batch": 0}, "batch = 0: allowed: 1 or more"),
        (settings(), {"context": 9, "new_tokens": -1}, "new_tokens = -1: allowed: 0 or more"),
        (
            settings(context_parallel={"profile": "no.json"}),
            {"context": 9},
            "profile = 'no.json' cannot be read",
        ),
    ],
)
def test_impossible_runs(tmp_path: Path, config: dict[str, Any], arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dry_run(saved(llama(), tmp_path), config, **arguments)


def test_learned_positions_have_an_end(tmp_path: Path) -> None:
    folder = saved(opt(), tmp_path)
    most = opt().max_position_embeddings
    assert dry_run(folder, settings()).context == most
    with pytest.raises(ValueError, match=f"need {most + 1} positions"):
        dry_run(folder, settings(), new_tokens=1)


def test_shares_that_do_not_add_up() -> None:
    model = empty_model(llama(), torch.float32)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    head_map = contiguous_head_map(*head_counts(model.config), 8)
    plans = [plan_placement(model, head_map, rank) for rank in range(8)]
    attentions = [f"model.layers.{layer}.self_attn" for layer in range(len(head_map.layers))]
    cut = check_coverage(shapes, plans, head_map, attentions)
    assert cut == 7 * len(head_map.layers)
    name = "model.layers.1.mlp.down_proj.weight"
    start, stop = plans[3][name].ranges[0]  # type: ignore[index]
    for broken, message in (
        (SliceSpec(1, ((start + 1, stop),)), f"{name}: index {start} of 97 is on no rank"),
        (SliceSpec(1, ((start - 1, stop),)), f"{name}: 1 of 97 indices of dimension 1 are doubled"),
        (SliceSpec(1, ((start, stop), (start, stop))), f"{name}: rank 3 holds index {start} twice"),
        (SliceSpec(1, ((start, 98),)), f"{name}: rank 3 holds {start} to 98 of 97 indices"),
        (SliceSpec(0, ((start, stop),)), f"{name} is cut otherwise on one rank"),
        (SliceSpec(zero=True), f"{name} is summed over ranks, but 7 of 8 ranks hold"),
        (WHOLE, f"{name} is cut otherwise on one rank"),
    ):
        with pytest.raises(MegaKVError, match=message):
            check_coverage(shapes, [*plans[:3], {**plans[3], name: broken}, *plans[4:]], head_map, attentions)
    key = "model.layers.0.self_attn.k_proj.weight"
    doubled = replace(plans[7][key], ranges=((0, 8), (24, 32)))
    with pytest.raises(MegaKVError, match=f"{key}: "):
        check_coverage(shapes, [*plans[:7], {**plans[7], key: doubled}], head_map, attentions)


def test_a_pass_notices_foreign_heads() -> None:
    model = empty_model(llama(), torch.float32)
    layers, heads, kv_heads = head_counts(model.config)
    with pytest.raises(MegaKVError, match=r"attention got \(query, key, value\) heads \(8, 4, 4\), the head map has 4"):
        run_shapes(model, contiguous_head_map(layers, heads, kv_heads, 2), 1, 5)
    runtime = ShapeRuntime(contiguous_head_map(layers, heads, kv_heads, 1), 0)
    q, k = torch.empty(1, 8, 3, 16, device="meta"), torch.empty(1, 4, 2, 16, device="meta")
    with pytest.raises(MegaKVError, match="do not fit each other"):
        runtime.attend(0, q, k, k, Scoring(1.0), None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(llama(), tmp_path / "model")
    config = tmp_path / "run.json"
    config.write_text(json.dumps(settings(cp=2, tp=2)))
    command = ["dry-run", "--config", str(config), "--model", str(folder), "--context", "64"]
    assert main([*command, "--hardware", "a100-nvlink", "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    assert "CP 2 x TP 2, 1 x 64 tokens" in shown and "fits: at most" in shown
    assert len(json.loads((tmp_path / "out.json").read_text())["ranks"]) == 4
    small = PRESETS["cpu"].model_copy(update={"name": "small", "memory_bytes": 9999})
    small.save(tmp_path / "small.json")
    assert main([*command, "--hardware", str(tmp_path / "small.json")]) == 1
    assert "rank 0 needs 0.0 GB" in capsys.readouterr().err
    for arguments, message in (
        (["--hardware", "a100-nvlnk"], "--hardware = 'a100-nvlnk' is neither a file nor a known machine"),
        (["--model", str(tmp_path)], "has no config.json"),
        (["--config", str(tmp_path / "none.json")], "cannot be read"),
    ):
        assert main([*command, *arguments]) == 1
        assert message in capsys.readouterr().err


def test_mapped_and_copied_heads(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "model")
    layers, kv_heads = llama().num_hidden_layers, llama().num_key_value_heads
    profile = BudgetProfile(model="org/model", budgets=tuple((90.0, 5.0, 4.0, 1.0) for _ in range(layers)))
    map_heads(profile, tp_size=2, copies=1).save(tmp_path / "map.json")
    mapping = load_mapping(tmp_path / "map.json", setting="test")
    held = [[len(mapping.head_map(8).shard(0, rank).kv_heads) for rank in range(2)]]
    assert sum(held[0]) == kv_heads + 1
    settled = settings(tp=2, fairkv={"budget": 0.25, "mapping": str(tmp_path / "map.json")})
    found = dry_run(folder, settled, context=400).ranks
    loaded = [
        build_model(
            folder, dtype=torch.bfloat16, load="random", tp_rank=rank, tp_size=2, all_reduce=lambda t: t,
            head_map=partial(place_heads, mapping),
        ).bytes_kept
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.weight_bytes for rank in found] == loaded
    other = settings(tp=4, fairkv={"budget": 0.25, "mapping": str(tmp_path / "map.json")})
    with pytest.raises(ValueError, match="is for 2 tensor-parallel ranks"):
        dry_run(folder, other, context=400)


def test_buffers_and_rows_of_an_offloaded_cache(tmp_path: Path) -> None:
    folder, config = saved(llama_mha(), tmp_path), llama_mha()

    def first(**offload: Any) -> VirtualRank:
        run = settings(offload={"enabled": True, "page_kib": 4, **offload})
        return dry_run(folder, run, context=1000).ranks[0]

    def pages(width: int) -> int:
        return config.num_hidden_layers * 4096 * -(-1000 // (4096 // width))

    row = dry_run(folder, settings(), context=1).ranks[0].kv_bytes // config.num_hidden_layers
    streamed, packed = first(method="stream"), first(method="stream", kv_bits=4)
    assert streamed.host_bytes == pages(row)
    assert streamed.kv_bytes == 2 * grown_bytes(1000 * row)
    inputs = 1000 * config.hidden_size * 2
    recomputed = first(method="kvpr", device_gb=1e-4)
    assert recomputed.host_bytes == pages(row) + pages(config.hidden_size * 2)
    # Activations lie beside the keys and values that they become.
    assert recomputed.kv_bytes == 2 * grown_bytes(1000 * row + inputs) + int(1e-4 * (1 << 30))
    # Half a byte for each element, and a step and a smallest value in float32 for each head's keys and values.
    bits = row // 4 + 2 * 2 * config.num_key_value_heads * 4
    assert packed.host_bytes == pages(bits)
    assert packed.kv_bytes == 2 * grown_bytes(1000 * (row + bits))
    heavy = dry_run(folder, settings(offload={"enabled": True, "weights": True, "host_gb": 1e-5}), context=9)
    assert "of weights, which lie in host memory alone" in str(heavy.problem)
    # With fewer KV heads activations are as large as keys and values: none are kept.
    folder, row = saved(llama(), tmp_path), row // 2
    assert first(method="kvpr").host_bytes == pages(row)
    settled = settings(offload={"enabled": True, "weights": "disk", "disk_gb": 1e-5})
    assert "of weights, which lie on disk alone" in str(dry_run(folder, settled, context=9).problem)
