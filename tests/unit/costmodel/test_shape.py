"""Sizes of models, from their configs alone, against published counts."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
)

from megakv.costmodel.memory import working_bytes
from megakv.costmodel.shape import LayerShape, ModelShape
from megakv.weights.gguf import gguf_directory
from megakv.weights.gguf_file import GgufFile
from tests.families import FAMILIES
from tests.gguf_files import config_of, write_gguf

UNGATED = {"opt", "falcon", "falcon_mqa", "falcon_alibi", "gpt_neox", "gpt_j", "bloom", "mpt", "phi", "starcoder2"}


def llama_405b() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=16384,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        intermediate_size=53248,
        vocab_size=128256,
    )


def test_llama_405b() -> None:
    shape = ModelShape.from_config(llama_405b(), dtype=torch.bfloat16)
    assert (shape.hidden, shape.intermediate, shape.vocab) == (16384, 53248, 128256)
    assert (shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim) == (128, 8, 128, 128)
    assert shape.parameters == 405_853_388_800
    assert shape.embedding == 2 * 128256 * 16384 + 16384
    assert shape.layer_kinds == ((0, 126),)
    layer = shape.layers[0]
    assert layer.dense == 16384 * (2 * 16384 + 2 * 1024 + 3 * 53248) + 2 * 16384
    assert layer.touched(1) == layer.touched(1000) == layer.dense
    assert layer.multiplied(7) == 7 * layer.dense


def test_rows_of_a_405b_layer_over_eight_ranks() -> None:
    layer = ModelShape.from_config(llama_405b(), dtype=torch.bfloat16).attention(tp_size=8)
    assert (layer.heads, layer.kv_heads) == (16, 1)
    assert layer.query_row_bytes == 16 * 128 * 2
    assert layer.kv_row_bytes == 2 * 128 * 2
    assert layer.partial_row_bytes == 16 * 129 * 4


def test_more_ranks_than_kv_heads() -> None:
    layer = ModelShape.from_config(llama_405b()).attention(tp_size=16)
    assert (layer.heads, layer.kv_heads) == (8, 1)


def test_experts() -> None:
    shape = ModelShape.from_config(MixtralConfig())
    assert shape.parameters == 46_702_792_704
    layer = shape.layers[0]
    assert (layer.n_experts, layer.active_experts) == (8, 2)
    assert layer.experts == 8 * 3 * 4096 * 14336
    assert layer.multiplied(1) == layer.dense + layer.experts / 4
    assert layer.touched(1) == pytest.approx(layer.dense + layer.experts / 4)
    assert layer.touched(2) == pytest.approx(layer.dense + layer.experts * (1 - 0.75**2))
    assert layer.touched(1000) == pytest.approx(layer.dense + layer.experts)
    # Half the bytes of experts; the router, which stays, is too small to tell.
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    wanted = (attention + 2 * 32_000 * 4096) * 2 + 32 * layer.experts
    half = ModelShape.from_config(MixtralConfig(), dtype=torch.bfloat16).with_fp8_feed_forward()
    assert half.weight_bytes == pytest.approx(wanted, rel=1e-4)


def test_latent_attention_and_mixed_layers() -> None:
    shape = ModelShape.from_config(DeepseekV3Config())
    assert (shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim) == (128, 128, 192, 128)
    # Cached are 512 numbers of latent and 64 of the rotated key, for 128 heads of 192 and 128, whatever the TP degree.
    for size in (1, 8):
        layer = shape.attention(tp_size=size)
        assert (layer.heads, layer.kv_row_bytes) == (128 // size, (512 + 64) * shape.element_bytes)
        assert (layer.absorbed.kv_heads, layer.absorbed.key_dim, layer.absorbed.value_dim) == (1, 576, 512)
        assert layer.absorbed.kv_row_bytes == layer.kv_row_bytes
        assert layer.expansion == 512 * (128 // size) * (128 + 128) and layer.absorbed.expansion == 0
        assert layer.of_pass([8192], [0], 4) is layer and layer.of_pass([1], [8192], 4) == layer.absorbed
    assert shape.cached_heads == 1
    assert shape.layer_kinds == ((0, 3), (3, 58))
    assert shape.layers[0].experts == 0
    assert (shape.layers[3].n_experts, shape.layers[3].active_experts) == (256, 8)


def test_windows_and_kernels() -> None:
    mistral = ModelShape.from_config(MistralConfig(num_hidden_layers=2, sliding_window=4096))
    assert [layer.window for layer in mistral.layers] == [4096, 4096]
    assert mistral.kernel == "flash"
    gemma = ModelShape.from_config(Gemma2Config(num_hidden_layers=4))
    assert [layer.window for layer in gemma.layers] == [4096, None, 4096, None]
    assert (gemma.kernel, gemma.attention(layer=1).window, gemma.attention().window) == ("math", None, 4096)
    assert ModelShape.from_config(BloomConfig(n_layer=2, hidden_size=64, n_head=4)).kernel == "math"
    falcon = FalconConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
    assert ModelShape.from_config(falcon).kv_heads == 1


def test_what_a_token_holds_in_a_layer() -> None:
    sizes = {"hidden_size": 4096, "word_embed_proj_dim": 4096, "ffn_dim": 16384, "num_attention_heads": 32}
    shape = ModelShape.from_config(OPTConfig(num_hidden_layers=2, **sizes), dtype=torch.float16)
    # Its feed-forward before and after the activation.
    assert working_bytes(shape) == 2 * (4 * 4096 + 2 * 16384)
    falcon = ModelShape.from_config(FalconConfig(num_hidden_layers=2), dtype=torch.bfloat16)
    assert falcon.intermediate == 4 * 4544
    assert working_bytes(falcon, tp_size=2) == 2 * (4 * 4544 + 4 * 4544)
    mixtral = ModelShape.from_config(MixtralConfig(num_hidden_layers=2), dtype=torch.bfloat16)
    assert working_bytes(mixtral) == 2 * (4 * 4096 + 2 * 3 * 14336)


def test_missed_experts_of_a_dense_layer() -> None:
    assert LayerShape(10).touched(3) == 10


def test_from_files(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    config.save_pretrained(tmp_path)
    expected = ModelShape.from_config(config, dtype=torch.float16)
    assert ModelShape.from_path(tmp_path, dtype=torch.float16) == expected
    assert ModelShape.from_path(tmp_path / "config.json", dtype=torch.float16) == expected
    assert expected.element_bytes == 2


@pytest.mark.parametrize("content", ["{", "[]", "{}", json.dumps({"model_type": "no such model"})])
def test_no_model(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    for place in (path, tmp_path):
        with pytest.raises(ValueError, match="no model config in"):
            ModelShape.from_path(place)
    with pytest.raises(ValueError, match="no model config in"):
        ModelShape.from_path(tmp_path / "nowhere")


def test_a_config_without_attention(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ValueError, match="mamba"):
        ModelShape.from_path(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_shape(family: str) -> None:
    config = FAMILIES[family]()
    shape = ModelShape.from_config(config, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert len(shape.layers) == config.get_text_config().num_hidden_layers
    assert sum(count for _, count in shape.layer_kinds) == len(shape.layers)
    assert shape.heads % shape.kv_heads == 0
    assert all(0 < layer.multiplied(1) <= layer.dense + layer.experts for layer in shape.layers)
    others = [p.shape for name, p in model.named_parameters() if not re.search("attn|attention", name)]
    assert {shape.intermediate, 2 * shape.intermediate} & {size for sizes in others for size in sizes}
    assert shape.feed_forward_tensors == (2 if family in UNGATED else 3)


def test_config_of_an_engine_is_left_as_it_is() -> None:
    """Families whose attention is substituted name one in their config that no other model has."""
    config = FAMILIES["falcon"]()
    expected = ModelShape.from_config(config)
    config._attn_implementation = "megakv_substituted"
    assert ModelShape.from_config(config) == expected
    assert config._attn_implementation == "megakv_substituted"


def test_blocks_of_a_file_are_counted(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", config_of("llama"), "Q4_K", kinds={"token_embd": "Q6_K"})
    stored = GgufFile(source)
    shape = ModelShape.from_path(gguf_directory(source, tmp_path / "cache"))
    norms = sum(tensor.rows * tensor.shape[-1] for tensor in stored.tensors.values() if len(tensor.shape) == 1)
    # Norms are computed with in bfloat16.
    assert shape.weight_bytes == pytest.approx(sum(stored.kinds.values()) + 2 * norms, abs=4)
    assert shape.outside_bytes == pytest.approx(199 * (144 + 210) + 2 * 256, abs=4)
