"""Adapters are merged as peft merges them, whole or by parts, or refused by name before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedModel,
)

import megakv
from megakv.base.errors import MegaKVError
from megakv.engine.config import load_config
from megakv.engine.loading import LoadedModel, build_model
from megakv.weights.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from megakv.weights.folder import adapter_directory, local_directory
from tests.adapters import SETTINGS, merged, save_adapter, save_base
from tests.families import VOCAB, llama, phi3
from tests.shards import ThreadRanks
from tests.wrappers import WRAPPERS
from tests.wrappers import saved as saved_wrapper


def gpt2() -> PreTrainedConfig:
    return GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)


def unused(tensor: Tensor) -> Tensor:
    raise AssertionError


def built(base: Path, adapter: Path, dtype: torch.dtype | None = None) -> LoadedModel:
    return build_model(base, dtype=dtype, adapter=adapter, all_reduce=unused)


def check_equal(loaded: LoadedModel, wanted: PreTrainedModel) -> None:
    """Bit by bit."""
    expected = wanted.state_dict()
    for name, value in loaded.module.state_dict().items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_those_that_peft_merges(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stored = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    save_base(llama(), tmp_path / "base", stored)
    save_adapter(tmp_path / "base", tmp_path / "adapter", **SETTINGS[name])
    check_equal(
        built(tmp_path / "base", tmp_path / "adapter", dtype), merged(tmp_path / "base", tmp_path / "adapter", dtype)
    )


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (phi3, {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 4}),
        (gpt2, {"target_modules": ["c_attn", "c_proj"], "r": 4, "fan_in_fan_out": True}),
        (gpt2, {"target_modules": ["c_attn"], "r": 4, "fan_in_fan_out": True, "use_dora": True, "bias": "all"}),
    ],
)
def test_fused_and_turned_weights(config: Callable[[], Any], settings: dict[str, Any], tmp_path: Path) -> None:
    save_base(config(), tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter", **settings)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    check_equal(built(base, adapter, torch.float32), merged(base, adapter, torch.float32))


@pytest.mark.parametrize("name", ["all", "dora"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_merge_their_shares(name: str, size: int, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_base(llama(), base)
    save_adapter(base, adapter, **SETTINGS[name])
    ids = torch.randint(1, VOCAB, (2, 33))
    with torch.no_grad():
        wanted = merged(base, adapter, torch.float32)(ids, use_cache=False).logits
    ranks = ThreadRanks(base, size, adapter=adapter)
    whole = built(base, adapter, torch.float32).bytes_read
    for loaded, logits in zip(ranks.ranks, ranks.logits(ids), strict=True):
        assert torch.allclose(logits, wanted, atol=1e-4)
        # Lengths of rows are those of whole rows.
        assert name == "dora" or loaded.bytes_read < 0.9 * whole


def test_large_weights_are_merged_by_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_base(llama(), base)
    for name in ("dora", "embeddings"):
        save_adapter(base, adapter, **SETTINGS[name])
        monkeypatch.setattr("megakv.weights.adapter.BLOCK_ELEMENTS", 1 << 24)
        wanted = built(base, adapter).module.state_dict()
        monkeypatch.setattr("megakv.weights.adapter.BLOCK_ELEMENTS", 333)
        for key, value in built(base, adapter).module.state_dict().items():
            assert torch.allclose(value, wanted[key], atol=1e-6), key


def test_of_a_model_of_images_the_text_part_is_merged(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    saved_wrapper(WRAPPERS["gemma3"](), base)
    save_adapter(base, adapter, AutoModelForImageTextToText, target_modules=["q_proj", "down_proj"], r=4)
    assert any("vision" in key for key in load_file(adapter / WEIGHTS_FILE))
    check_equal(built(base, adapter, torch.float32), merged(base, adapter, torch.float32, AutoModelForImageTextToText))


def test_tokens_are_the_merged_model_s(alone: None, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_base(llama(), base)
    save_adapter(base, adapter, **SETTINGS["all"])
    ids = torch.randint(1, VOCAB, (1, 40))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = merged(base, adapter, torch.float32).generate(ids, **options)
    digests = set()
    for model, section in ((base, {"adapter": str(adapter)}), (adapter, {}), (base, {})):
        with megakv.init_inference(model, {"dtype": "fp32", "megakv": section}) as engine:
            assert torch.equal(engine.generate(ids, **options), wanted) == (section != {} or model == adapter)
            digests.add(engine.weights_digest)
            assert engine.report().model == str(model) + (f" + {adapter}" if section else "")
    assert len(digests) == 2


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base model and an adapter of it."""
    save_base(llama(), tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "adapter", **SETTINGS["all"])
    return tmp_path / "base", tmp_path / "adapter"


def change_config(adapter: Path, **values: Any) -> None:
    path = adapter / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3': allowed: 'LORA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa': it changed the base weights, too"),
        ({"use_qalora": True}, "use_qalora = True: such an adapter cannot be merged here"),
        ({"target_parameters": ["x"]}, "target_parameters = .*cannot be merged here"),
        ({"heard_of_never": 1}, "heard_of_never = 1: such an adapter cannot be merged here"),
        ({"r": 0}, "r, lora_alpha or a pattern is missing or no number"),
        ({"lora_alpha": "much"}, "r, lora_alpha or a pattern is missing or no number"),
        ({"r": 7}, r"has the shape \[3, 64\], expected \[7, 64\] by the model and adapter_config.json"),
        ({"rank_pattern": {"(a*)*b": 3}}, "would take too long to match"),
        ({"rank_pattern": {"(": 3}}, "is no regular expression"),
        ({"use_dora": True}, "comes without its magnitude"),
    ],
)
def test_settings_that_cannot_be_merged(values: dict[str, Any], message: str, pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    change_config(adapter, **values)
    with pytest.raises(MegaKVError, match=message):
        built(base, adapter)


def change_tensors(adapter: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(adapter / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS_FILE)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[f"{FIRST}.lora_A.weight"].fill_(float("nan")), "holds values that are no numbers"),
        (lambda t: t.pop(f"{FIRST}.lora_B.weight"), "q_proj.lora_A.weight comes without its B"),
        (lambda t: t.update({f"{FIRST}.lora_C": torch.ones(2)}), "lora_C is of no kind that can be merged"),
        (
            lambda t: t.update({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(3, 64)}),
            "changes model.layers.9.mlp.up_proj.weight, which LlamaForCausalLM has not: it is of another model",
        ),
        (lambda t: t.clear(), "changes no weight of LlamaForCausalLM"),
    ],
)
def test_tensors_that_do_not_fit(change: Any, message: str, pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    change_tensors(adapter, change)
    with pytest.raises(MegaKVError, match=message):
        built(base, adapter)


def test_files_that_are_none(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    (adapter / WEIGHTS_FILE).write_bytes((adapter / WEIGHTS_FILE).read_bytes()[:-10])
    with pytest.raises(MegaKVError, match="is cut short or broken"):
        built(base, adapter)
    (adapter / WEIGHTS_FILE).unlink()
    with pytest.raises(MegaKVError, match="has no adapter_model.safetensors: allowed: a folder that peft's"):
        adapter_directory(base, adapter)
    with pytest.raises(MegaKVError, match="has no adapter_config.json: allowed: a folder that peft's"):
        adapter_directory(base, base)


def test_tied_embeddings_are_not_changed_on_one_side(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_base(llama(tie_word_embeddings=True), base)
    save_adapter(base, adapter, target_modules=["embed_tokens"], r=4)
    with pytest.raises(MegaKVError, match="to which lm_head.weight is tied, so that merging changes both"):
        built(base, adapter)


def test_an_adapter_s_folder_stands_for_its_base(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    assert local_directory(adapter) == base and adapter_directory(adapter, None) == adapter
    assert adapter_directory(base, None) is None and adapter_directory(base, adapter) == adapter
    with pytest.raises(MegaKVError, match="is an adapter, and so is"):
        adapter_directory(adapter, adapter)
    for named in ("someone/unheard-of", None, str(adapter)):
        change_config(adapter, base_model_name_or_path=named)
        with pytest.raises(MegaKVError, match=r"is an adapter, of base_model_name_or_path = .*; give that model, and"):
            local_directory(adapter)
    (base / CONFIG_FILE).write_text("{}")
    with pytest.raises(MegaKVError, match=r"holds a model and an adapter: set megakv.adapter .* or remove"):
        adapter_directory(base, None)


def test_settings_that_exclude_one(pair: tuple[Path, Path], alone: None) -> None:
    _, adapter = pair
    with pytest.raises(ValueError, match=r"megakv.adapter = '.*' changes .*; megakv.load is 'random'"):
        load_config({"megakv": {"adapter": str(adapter), "load": "random"}})
    module = AutoModelForCausalLM.from_config(llama())
    with pytest.raises(ValueError, match="is for the folder of a model: merge it into a loaded one"):
        megakv.init_inference(module, {"megakv": {"adapter": str(adapter)}})
