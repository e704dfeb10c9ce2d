"""Offloaded weights, and sequences decoded in groups layer by layer: the plain model's tokens."""

import copy
import os
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import megakv
from megakv.base.errors import MegaKVError
from megakv.offload.config import OffloadConfig
from megakv.offload.weight_stream import WeightStream, _BufferedLayer
from megakv.offload.weights import ALIGNMENT, LayerWeights
from tests.families import CONFIGS, FAMILIES
from tests.tiny_configs import tiny_config
from tests.unit.offload.test_exactness import generate, plain_model, ragged

NAMED = ("opt", "llama", "llama_mha", "qwen3", "gpt_neox", "falcon", "gemma")
AS_LARGE = ("llama", "falcon")
"""Activations are no smaller than keys and values."""
SLOW_GB_S = 0.05


def deep_model(name: str, layers: int = 5) -> Any:
    """More layers than buffers."""
    config = CONFIGS[name]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * layers
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are on their way are NaN until they are there."""
    start = WeightStream._start_piece

    def start_over_nans(self: WeightStream, coming: _BufferedLayer) -> None:
        first, last = self._cuts[coming.layer][len(coming.transfers) : len(coming.transfers) + 2]
        self._buffers[coming.buffer][first:last].fill_(255)
        start(self, coming)

    monkeypatch.setattr(WeightStream, "_start_piece", start_over_nans)


@pytest.mark.drawn(6)
@pytest.mark.usefixtures("fixed_costs", "poisoned")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_waits_for_its_weights(name: str, offloaded: Any) -> None:
    model = plain_model(name)
    ids, mask = ragged(4)
    expected = generate(copy.deepcopy(model), ids, mask, max_new_tokens=4)
    engine = offloaded(model, weights=True, num_gpu_batches=3, emulated_link_gb_s=SLOW_GB_S)
    assert torch.equal(generate(engine, ids, mask, max_new_tokens=4), expected)


@pytest.mark.usefixtures("fixed_costs", "poisoned")
@pytest.mark.parametrize(
    ("weights", "groups"),
    [(True, 2), *(pytest.param(*each, marks=pytest.mark.full) for each in ((True, 1), (False, 3)))],
)
@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", NAMED)
def test_beams_in_groups_over_both_tiers(name: str, weights: bool, groups: int, offloaded: Any, tmp_path: Any) -> None:
    model = deep_model(name)
    ids, mask = ragged(4)
    expected = generate(model, ids, mask, num_beams=2)
    held = sum(p.nbytes for name, p in model.named_parameters() if ".layers." in name or ".h." in name)
    host = (held if weights else 0) + 8 * 8192
    tiers = {"host_gb": host / (1 << 30), "disk_gb": 0.02, "disk_path": str(tmp_path)}
    engine = offloaded(copy.deepcopy(model), method="chunked", weights=weights, num_gpu_batches=groups, **tiers)
    assert torch.equal(generate(engine, ids, mask, num_beams=2), expected)
    pays = name not in AS_LARGE
    assert all((0 < step.split.recomputed < step.cached) == pays for step in engine._offloader.steps)
    assert engine._offloader.pool.used()["disk"]


@pytest.mark.usefixtures("fixed_costs")
def test_sessions_go_on_in_groups(offloaded: Any) -> None:
    model = deep_model("llama")
    engine = offloaded(copy.deepcopy(model), weights=True, num_gpu_batches=2)
    session = engine.session()
    history = torch.empty(3, 0, dtype=torch.int64)
    generator = torch.Generator().manual_seed(11)
    for length in (17, 1, 9):
        turn = torch.randint(3, 190, (3, length), generator=generator)
        history = torch.cat([history, turn], dim=1)
        history = generate(model, history, torch.ones_like(history), max_new_tokens=5)
        assert torch.equal(session.generate(turn, max_new_tokens=5, do_sample=False, pad_token_id=0), history)


@pytest.mark.parametrize(("groups", "weights"), [(1, True), (3, True), (3, False), (2, "disk")])
def test_weights_come_once_a_step_and_only_layers_are_buffered(
    groups: int, weights: Any, offloaded: Any, tmp_path: Any
) -> None:
    model = deep_model("opt", layers=6)
    ids, mask = ragged(6)
    resident = offloaded(copy.deepcopy(model), method="stream")
    expected = generate(resident, ids, mask)
    disk = {"disk_gb": 0.02, "disk_path": str(tmp_path)} if weights == "disk" else {}
    engine = offloaded(copy.deepcopy(model), method="stream", weights=weights, num_gpu_batches=groups, **disk)
    assert torch.equal(generate(engine, ids, mask), expected)
    offloader = engine._offloader
    whole = 0
    if weights:
        layer = model.model.decoder.layers[0]
        whole = 6 * sum(p.nbytes for p in layer.parameters() if p.ndim > 1)
        # Two layers, padded to the alignment.
        assert whole // 3 <= offloader.weights.nbytes <= whole // 3 + 2 * 16 * ALIGNMENT
    # Steps run ahead of their records by what is in two buffers; over all of them that is little.
    steps, plain = offloader.steps, resident._offloader.steps
    brought = sum(step.bytes_in for step in steps) / len(steps)
    cached = sum(step.bytes_in for step in plain) / len(plain)
    assert brought == pytest.approx(cached + whole, rel=0.08)
    assert [step.report().weight_bytes for step in steps] == [whole] * len(steps)
    if groups > 2:
        held = offloader.staging_bytes - (offloader.weights.nbytes if weights else 0)
        assert held < 0.6 * resident._offloader.staging_bytes


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("name", "weights"), [("llama", True), ("gpt_oss", True), ("deepseek_v3", True), ("gpt_oss", "disk")]
)
def test_fp8_weights_come_with_their_scales(name: str, weights: Any, offloaded: Any, tmp_path: Any) -> None:
    model = plain_model(name)
    ids, mask = ragged(4)
    resident = offloaded(copy.deepcopy(model), enabled=False, form="fp8")
    expected = generate(resident, ids, mask, max_new_tokens=4)
    held = [p.nbytes for p in resident.module.model.layers.parameters() if p.ndim > 1]
    places = {"disk_gb": 0.02, "disk_path": str(tmp_path), "emulated_link_gb_s": SLOW_GB_S}
    engine = offloaded(model, "fp8", method="stream", weights=weights, num_gpu_batches=2, **places)
    assert torch.equal(generate(engine, ids, mask, max_new_tokens=4), expected)
    assert any(p.dtype == torch.float8_e4m3fn for p in engine.module.model.layers.parameters())
    brought = engine._offloader.weights.step_bytes
    assert sum(held) <= brought <= sum(held) + ALIGNMENT * len(held)
    assert {step.report().weight_bytes for step in engine._offloader.steps} == {brought}
    engine.destroy()
    left = dict(engine.module.named_parameters())
    assert all(torch.equal(left[key].float(), value.float()) for key, value in resident.module.named_parameters())


def test_prompts_go_group_by_group_through_each_layer(offloaded: Any) -> None:
    """A layer's weights come once for all groups, and it works with the tokens, new and cached, of one at a time."""
    model = deep_model("llama")
    ids, mask = ragged(6)
    turn = torch.randint(3, 190, (6, 9), generator=torch.Generator().manual_seed(3))
    expected = generate(model, ids, mask, max_new_tokens=2)
    history = torch.cat([expected, turn], dim=1)
    later = generate(model, history, torch.cat([mask, mask.new_ones(6, 11)], dim=1), max_new_tokens=2)
    rows: dict[int, list[int]] = {1: [], 3: []}
    brought, held = {}, {}
    for groups, seen in rows.items():
        engine = offloaded(copy.deepcopy(model), method="stream", weights=True, num_gpu_batches=groups)
        layer = engine.module.model.layers[2]
        handle = layer.mlp.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].shape[1]))
        session = engine.session()
        assert torch.equal(generate(session, ids, mask, max_new_tokens=2), expected)
        link = engine._offloader.link
        before = link.traffic["in"].nbytes
        assert torch.equal(generate(session, turn, torch.ones_like(turn), max_new_tokens=2), later)
        brought[groups] = link.traffic["in"].nbytes - before
        held[groups] = engine._offloader.staging_bytes - engine._offloader.weights.nbytes
        handle.remove()
    # Prompts, then one token of each sequence: those go through the layer together.
    assert rows == {1: [194, 6, 60, 6], 3: [69, 82, 43, 6, 20, 20, 20, 6]}
    assert brought[3] == pytest.approx(brought[1], rel=0.15)
    assert held[3] < 0.6 * held[1]


def test_an_error_in_a_layer_leaves_the_weights_in_order(offloaded: Any) -> None:
    model = deep_model("llama")
    ids, mask = ragged()
    expected = generate(model, ids, mask)
    engine = offloaded(copy.deepcopy(model), weights=True, emulated_link_gb_s=SLOW_GB_S)
    handle = engine.module.model.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(engine, ids, mask)
    handle.remove()
    assert torch.equal(generate(engine, ids, mask), expected)
    engine.destroy()
    assert torch.equal(engine.module.model.layers[3].mlp.up_proj.weight, model.model.layers[3].mlp.up_proj.weight)


def test_weights_on_disk_that_fails_once(offloaded: Any, tmp_path: Any) -> None:
    """They are read beside rows that lie there too; what the disk does not give back ends one generation."""
    model = deep_model("llama")
    ids, mask = ragged(4)
    expected = generate(model, ids, mask)
    disk = {"host_gb": 8 * 8192 / (1 << 30), "disk_gb": 0.02, "disk_path": str(tmp_path)}
    engine = offloaded(copy.deepcopy(model), method="stream", weights="disk", num_gpu_batches=2, **disk)
    assert torch.equal(generate(engine, ids, mask), expected)
    weights, steps = engine._offloader.weights, engine._offloader.steps
    assert sum(step.disk_bytes for step in steps) > 0.9 * len(steps) * weights.step_bytes
    assert engine._offloader.pool.used()["disk"] and engine.report().ranks[0].disk_io
    file = weights._weights.tier.fileno
    content = os.pread(file, size := os.fstat(file).st_size, 0)
    os.ftruncate(file, 0)
    with pytest.raises(MegaKVError, match="transfer of .* failed: the file in megakv.offload.disk_path"):
        generate(engine, ids, mask)
    assert os.pwrite(file, content, 0) == size
    assert torch.equal(generate(engine, ids, mask), expected)
    engine.destroy()
    assert torch.equal(engine.module.model.layers[3].mlp.up_proj.weight, model.model.layers[3].mlp.up_proj.weight)


def test_weights_beyond_the_budget_are_refused_with_the_numbers(offloaded: Any, tmp_path: Any) -> None:
    model = deep_model("llama")
    with pytest.raises(ValueError, match=r"weights = true needs \d.*KiB of host memory.*host_gb holds 512.00 KiB"):
        offloaded(model, weights=True, host_gb=512 / (1 << 20))
    with pytest.raises(ValueError, match=r"weights = 'disk' needs \d.*KiB of disk space.*disk_gb holds 512.00 KiB"):
        offloaded(model, weights="disk", disk_gb=512 / (1 << 20), disk_path=str(tmp_path))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("megakv_section", "message"),
    [
        ({"offload": {"weights": True}}, r"offload.weights is set: that needs megakv.offload.enabled = true"),
        ({"offload": {"num_gpu_batches": 2}}, r"num_gpu_batches is set: that needs megakv.offload.enabled = true"),
        ({"offload": {"host_gb": 2.5}}, r"offload.host_gb is set: that needs megakv.offload.enabled = true"),
        ({"offload": {"enabled": True, "weights": "disk"}}, r"weights = 'disk' needs megakv.offload.disk_gb"),
        ({"offload": {"enabled": True, "num_gpu_batches": 0}}, r"num_gpu_batches"),
    ],
)
def test_contradictions_are_refused(megakv_section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        megakv.init_inference(plain_model("llama"), {"dtype": "fp32", "megakv": megakv_section})


def test_weights_for_keys_and_values_come_first() -> None:
    for name, first in (("llama", {"k_proj", "v_proj"}), ("gpt_neox", {"query_key_value"}), ("phi3", {"qkv_proj"})):
        model = plain_model(name)
        dtypes = {key: torch.float32 for key in dict(model.named_parameters())}
        weights = LayerWeights(model, dtypes, OffloadConfig(enabled=True, host_gb=1.0, weights=True), pin=False)
        for places in weights.layers:
            early = {place.name.split(".")[-2] for place in places.places if place.stop <= places.keys_rows * ALIGNMENT}
            assert early == first
            late = [place.name for place in places.places if place.offset >= places.attention_rows * ALIGNMENT]
            assert late and all("mlp" in name for name in late)
        weights.close()


# Fused, separate and latent projections, and gates, inside attention.
@pytest.mark.drawn(3)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("family", ["afmoe", "bert", "deepseek_v2", "gpt2", "laguna", "phi3"])
@pytest.mark.parametrize("groups", [1, 2])
def test_weights_come_in_time_whatever_their_names(family: str, groups: int, offloaded: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
    ids = torch.randint(3, 90, (4, 23), generator=torch.Generator().manual_seed(5))
    expected = generate(model, ids, torch.ones_like(ids), use_cache=False)
    engine = offloaded(
        copy.deepcopy(model), method="stream", weights=True, num_gpu_batches=groups, emulated_link_gb_s=SLOW_GB_S
    )
    assert torch.equal(generate(engine, ids, torch.ones_like(ids)), expected)
