"""Plain weights rounded to blocks as they load: what comes of them, what stays plain, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import megakv
from megakv.engine.loading import build_model
from megakv.weights.blocks import pack
from megakv.weights.gguf import gguf_directory
from megakv.weights.packed_linear import PackedEmbedding, PackedLinear, unpack_modules
from tests.families import FAMILIES
from tests.gguf_files import config_of, write_gguf

HERE: dict[str, Any] = {"dtype": None, "all_reduce": lambda tensor: tensor}
KINDS = {"int8": ("Q8_0", "Q8_0"), "q4_1": ("Q4_1", "Q8_0")}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakv.weights.folder.gguf_directory", partial(gguf_directory, cache=tmp_path / "cache"))


def model_of(config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("given", [True, False], ids=["module", "folder"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_their_blocks(name: str, given: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of(config_of("qwen2"), dtype)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if not given:
        model.save_pretrained(tmp_path)
    loaded = build_model(model if given else tmp_path, **HERE, weights=name)
    inside, outside = KINDS[name]
    packed = {path: module for path, module in loaded.module.named_modules() if hasattr(module, "kind")}
    assert len(packed) == 2 * 7 + 2
    for path, module in packed.items():
        assert isinstance(module, PackedLinear | PackedEmbedding)
        assert module.kind == (inside if ".layers." in path else outside)
        assert torch.equal(module.weight, pack(plain[f"{path}.weight"], module.kind)), path
    whole = sum(tensor.nbytes for tensor in plain.values()) * 4 // dtype.itemsize
    assert loaded.form == name and loaded.bytes_kept < 0.28 * whole
    ids = torch.randint(3, 190, (2, 9))
    with torch.no_grad():
        found = loaded.module(ids).logits
        unpack_modules(loaded.module, dtype)
        wanted = loaded.module(ids).logits
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", KINDS)
def test_experts_are_those_of_their_blocks(name: str) -> None:
    model = model_of(config_of("qwen3_moe"))
    plain = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    loaded = build_model(model, **HERE, weights=name)
    ids = torch.randint(3, 190, (2, 9))
    with torch.no_grad():
        found = loaded.module(ids).logits
    experts = loaded.module.model.layers[1].mlp.experts
    for part in ("gate_up_proj", "down_proj"):
        rows = plain[f"model.layers.1.mlp.experts.{part}"].flatten(0, 1)
        assert torch.equal(getattr(experts, part).flatten(0, 1), pack(rows, KINDS[name][0]))
    assert KINDS[name][0] in loaded.bytes_by_type
    unpack_modules(loaded.module, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(found, loaded.module(ids).logits, rtol=1e-4, atol=1e-4)


def test_rows_that_are_no_whole_blocks_stay_plain(tmp_path: Path) -> None:
    loaded = build_model(model_of(FAMILIES["llama"]()), **HERE, weights="int8")
    layer = loaded.module.model.layers[0]
    assert isinstance(layer.mlp.up_proj, PackedLinear) and type(layer.mlp.down_proj) is torch.nn.Linear
    assert layer.mlp.down_proj.in_features == 97


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"weights.format = 'int8' is not supported for model type 'gpt_oss': its exp"):
        build_model(model_of(FAMILIES["gpt_oss"]()), **HERE, weights="int8")
    with pytest.raises(ValueError, match=r"weights.format = 'q4_1' cannot be used on meta: blocks are multiplied by"):
        build_model(model_of(config_of("llama")), **HERE, weights="q4_1", device="meta")
    # Two heads of 12: the first rank's run of columns ends within a block.
    config = config_of("llama", 96, num_attention_heads=8, num_key_value_heads=8, intermediate_size=128)
    with pytest.raises(ValueError, match=r"tp_size = 2 cuts the rows of model.layers.0.self_attn.o_proj.weight, 96 we"):
        build_model(model_of(config), **HERE, weights="int8", tp_size=2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("weights", [True, "disk"])
def test_blocks_off_the_accelerator(weights: Any, tmp_path: Path) -> None:
    """Bytes come and go as those of any matrix, of a file and of weights that are made at load."""
    source = write_gguf(tmp_path / "tiny.gguf", config_of("llama"), "Q5_1")
    folder = tmp_path / "plain"
    model_of(config_of("qwen2")).save_pretrained(folder)
    ids = torch.randint(3, 190, (2, 25), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    away = {"enabled": True, "method": "stream", "weights": weights, "host_gb": 0.1, "page_kib": 8}
    away |= {"disk_gb": 0.1, "disk_path": str(tmp_path)} if weights == "disk" else {}
    for model, form in ((source, "as_stored"), (folder, "int8")):
        found = []
        for offload in ({}, away):
            section = {"weights": {"format": form}, "offload": offload}
            with megakv.init_inference(str(model), {"dtype": "fp32", "megakv": section}) as engine:
                found.append(engine.generate(ids, **options))
        assert torch.equal(*found), form


@pytest.mark.usefixtures("alone")
def test_sessions_go_on_with_the_same_blocks_only(tmp_path: Path) -> None:
    files = [write_gguf(tmp_path / f"{seed}.gguf", config_of("llama"), "Q4_0", seed=seed) for seed in (0, 1)]
    ids = torch.randint(3, 190, (1, 25), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with megakv.init_inference(str(files[0]), {"dtype": "fp32"}) as engine:
        session = engine.session()
        session.generate(ids, **options)
        session.save(tmp_path / "session")
        wanted = session.generate(ids[:, :3], **options)
    with megakv.init_inference(str(files[0]), {"dtype": "fp32"}) as engine:
        assert torch.equal(engine.restore_session(tmp_path / "session").generate(ids[:, :3], **options), wanted)
    with (
        megakv.init_inference(str(files[1]), {"dtype": "fp32"}) as engine,
        pytest.raises(Exception, match="was saved with another model"),
    ):
        engine.restore_session(tmp_path / "session")
