"""A model loaded for one rank alone is the model that transformers loads."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from megakv.base.errors import MegaKVError
from megakv.engine.build import _may_split
from megakv.engine.config import load_config
from megakv.engine.loading import build_model
from tests.families import FAMILIES, llama
from tests.shards import ThreadRanks


def unused(tensor: Tensor) -> Tensor:
    raise AssertionError("a rank alone sums nothing")


def everything(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_whole_load_equals_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(FAMILIES[name]()).save_pretrained(tmp_path)
    wanted = everything(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
    loaded = build_model(tmp_path, dtype=dtype, all_reduce=unused)
    got = everything(loaded.module)
    assert set(got) == set(wanted)
    for key, tensor in wanted.items():
        assert got[key].dtype == tensor.dtype and torch.equal(got[key], tensor), key
    tied = {key: [k for k, v in wanted.items() if v is tensor] for key, tensor in wanted.items()}
    assert tied == {key: [k for k, v in got.items() if v is tensor] for key, tensor in got.items()}
    assert not loaded.module.training and not any(p.requires_grad for p in loaded.module.parameters())
    assert loaded.bytes_kept == sum(tensor.nbytes for tensor in {id(t): t for t in wanted.values()}.values())
    assert loaded.head_map.tp_size == 1


def test_type_defaults_to_the_checkpoints_own(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(llama(), dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = build_model(tmp_path, dtype=None, all_reduce=unused).module
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_generation_config_comes_along(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(llama())
    model.generation_config = GenerationConfig(max_new_tokens=17, do_sample=True, top_k=3)
    model.save_pretrained(tmp_path)
    got = build_model(tmp_path, dtype=None, all_reduce=unused).module.generation_config
    assert (got.max_new_tokens, got.do_sample, got.top_k) == (17, True, 3)


def test_random_model_needs_only_a_config_and_is_the_same_on_every_mesh(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    ids = torch.randint(1, 199, (2, 21))
    wanted, *_ = ThreadRanks(tmp_path, 1, load="random", seed=5).logits(ids)
    assert 0.1 < wanted.std() < 10
    for size in (2, 4):
        ranks = ThreadRanks(tmp_path, size, load="random", seed=5)
        assert all(loaded.bytes_read == 0 for loaded in ranks.ranks)
        for logits in ranks.logits(ids):
            torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    other, *_ = ThreadRanks(tmp_path, 1, load="random", seed=6).logits(ids)
    assert not torch.allclose(other, wanted, atol=0.1)


def test_given_module_alone_keeps_its_memory() -> None:
    model = AutoModelForCausalLM.from_config(llama())
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    loaded = build_model(model, dtype=torch.float32, all_reduce=unused)
    assert loaded.module is model
    assert pointers == {name: p.data_ptr() for name, p in model.named_parameters()}
    half = build_model(model, dtype=torch.bfloat16, all_reduce=unused).module
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


def test_progress_is_shown_where_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    AutoModelForCausalLM.from_config(llama()).save_pretrained(tmp_path)
    capfd.readouterr()
    build_model(tmp_path, dtype=None, all_reduce=unused)
    assert capfd.readouterr().err == ""
    build_model(tmp_path, dtype=None, all_reduce=unused, progress=True)
    assert "Loading weights: 100%" in capfd.readouterr().err


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(MegaKVError, match="has no config.json"):
        build_model(tmp_path, dtype=None, all_reduce=unused)
    with pytest.raises(ValueError, match="model is a Linear, not a transformers PreTrainedModel"):
        build_model(nn.Linear(2, 2), dtype=None, all_reduce=unused)
    model = AutoModelForCausalLM.from_config(llama())
    with pytest.raises(ValueError, match="tp_size = 3 cannot split 8 query heads over 4 KV heads"):
        build_model(model, dtype=None, tp_size=3, all_reduce=unused)
    # That is seen before ranks meet, for whom an operator would be built.
    model.config.save_pretrained(tmp_path)
    for given in (model, tmp_path):
        for size in (2, 3):
            assert _may_split(given, load_config({"tensor_parallel": {"tp_size": size}})) == (size == 2)
    assert not _may_split(tmp_path / "nowhere", load_config({"tensor_parallel": {"tp_size": 2}}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no_such_model"}, "model_type = 'no_such_model' is none that transformers knows"),
        ({"model_type": "t5"}, "T5Config"),
        (
            {"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 1},
            "is not supported: its forward takes no past_key_values and no position_ids",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            r"quantization_config.bits = 3 is not supported; allowed: 2 or 4 or 8",
        ),
    ],
)
def test_configs_that_are_refused(change: dict, message: str, tmp_path: Path) -> None:
    values = change if change.get("model_type") == "mamba" else llama().to_dict() | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises((ValueError, MegaKVError), match=message):
        build_model(tmp_path, dtype=torch.float32, all_reduce=unused)


def test_config_that_does_not_parse(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON: column 2: Expecting property name"):
        build_model(tmp_path, dtype=torch.float32, all_reduce=unused)
