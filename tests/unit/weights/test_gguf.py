"""GGUF files: small real ones are converted once, and broken ones, or a full disk, leave nothing behind."""

import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from megakv.base.errors import MegaKVError
from megakv.weights.file_digests import KEPT
from megakv.weights.folder import local_directory
from megakv.weights.gguf import gguf_directory

WIDTH, LAYERS, HEADS, MIDDLE = 64, 2, 2, 128
TOKENS = ["<end>", *"abcdefgh", "ab"]


def write_gguf(path: Path, kind: GGMLQuantizationType, *, leave_out: str = "", parts: int = 1) -> Path:
    """A tiny Llama with a tokenizer, its matrices in the type `kind`."""
    writer, rng = GGUFWriter(path, "llama"), np.random.default_rng(0)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * (len(TOKENS) - 1)])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id, writer.add_pad_token_id):
        add(0)
    square, up = (WIDTH, WIDTH), (MIDDLE, WIDTH)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        parts = {"attn_q": square, "attn_k": square, "attn_v": square, "attn_output": square, "ffn_gate": up}
        norms = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in (parts | norms).items()}
        shapes |= {f"blk.{layer}.ffn_up": up, f"blk.{layer}.ffn_down": (WIDTH, MIDDLE)}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if name == leave_out:
            continue
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def left_in(cache: Path) -> list[str]:
    names = [path.name for path in cache.iterdir()] if cache.exists() else []
    return [name for name in names if not name.endswith(".lock") and name != KEPT]


@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", torch.bfloat16), ("F32", torch.float32)])
def test_converted_once(kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("megakv.weights.gguf.CACHE", cache)
    source = write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    folder = gguf_directory(source, cache)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == dtype and model.config.num_hidden_layers == LAYERS
    assert (folder / "model.safetensors").is_file()
    expected = np.random.default_rng(0).standard_normal((len(TOKENS), WIDTH), dtype=np.float32)
    found = model.model.embed_tokens.weight.float().detach().numpy()
    assert np.allclose(found, expected, atol=0 if kind == "F32" else 0.05)
    assert AutoTokenizer.from_pretrained(folder)("abc").input_ids[-2:] == [TOKENS.index("ab"), TOKENS.index("c")]
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert gguf_directory(source, cache) == folder and (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert left_in(cache) == [folder.name]


def test_broken_files(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    whole = write_gguf(tmp_path / "whole.gguf", GGMLQuantizationType.F32).read_bytes()
    for name, content in {
        "cut": whole[:-1000],
        "head": whole[:100],
        "other": b"no GGUF at all" * 9,
        "none": b"",
    }.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(MegaKVError, match=f"{name}.gguf is cut short or no GGUF file"):
            gguf_directory(path, cache)
    partial = write_gguf(tmp_path / "partial.gguf", GGMLQuantizationType.F32, leave_out="blk.1.ffn_up")
    with pytest.raises(MegaKVError, match="partial.gguf lacks model.layers.1.mlp.up_proj.weight; fetch it again"):
        gguf_directory(partial, cache)
    with pytest.raises(MegaKVError, match=r"model '\S+absent.gguf': there is no such GGUF file"):
        local_directory(tmp_path / "absent.gguf")
    assert left_in(cache) == []


def test_a_part_of_a_split_file_is_called_one(tmp_path: Path) -> None:
    named = write_gguf(
        tmp_path / "tiny-00001-of-00002.gguf", GGMLQuantizationType.F32, leave_out="output_norm", parts=2
    )
    message = (
        r"is part 1 of 2 of a split GGUF file, tiny-00001-of-00002\.gguf to tiny-00002-of-00002\.gguf: join them by "
        r"llama\.cpp's `llama-gguf-split --merge tiny-00001-of-00002\.gguf tiny\.gguf`, and give tiny\.gguf$"
    )
    with pytest.raises(MegaKVError, match=message):
        gguf_directory(named, tmp_path / "cache")
    renamed = named.rename(tmp_path / "renamed.gguf")
    with pytest.raises(MegaKVError, match="is one of 2 parts of a split GGUF file: .* `llama-gguf-split --merge`$"):
        gguf_directory(renamed, tmp_path / "cache")


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.F32)
    cache = tmp_path / "cache"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(MegaKVError, match="tiny.gguf cannot be converted into .*cache"):
            gguf_directory(source, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left_in(cache) == []
    # What one that was killed has left goes with the next.
    folder = gguf_directory(source, cache)
    shutil.rmtree(folder)
    (cache / f".{folder.name}.killed").mkdir()
    assert left_in(cache) and gguf_directory(source, cache) == folder
    assert left_in(cache) == [folder.name]
