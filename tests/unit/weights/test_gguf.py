"""GGUF files: read as they come, in their blocks, by parts; broken ones are named, and leave nothing behind."""

import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from megakv.base.errors import MegaKVError
from megakv.engine.loading import build_model
from megakv.weights.files import weight_files
from megakv.weights.folder import local_directory, read_config, read_generation_config
from megakv.weights.gguf import gguf_directory
from megakv.weights.gguf_file import GgufFile
from megakv.weights.packed_linear import PackedEmbedding, PackedLinear, unpack_modules
from megakv.weights.placement import contiguous_head_map
from tests.gguf_files import VOCAB, config_of, write_gguf

HERE = {"dtype": torch.float32, "all_reduce": lambda tensor: tensor}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def by_transformers(source: Path, folder: Path) -> PreTrainedModel:
    """What transformers makes of a file, with the config of its folder."""
    unpack = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        config=read_config(folder),
        dtype=torch.float32,
        quantization_config=unpack,
    ).eval()


def left_in(cache: Path) -> list[str]:
    names = [path.name for path in cache.iterdir()] if cache.exists() else []
    return [name for name in names if not name.endswith(".lock")]


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(3, 190, (2, 19), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "Q5_1"), ("gemma2", "Q8_0"), ("qwen2", "Q4_K"), ("qwen2", "F16"), ("llama", "IQ4_NL")],
)
def test_logits_are_those_of_transformers(family: str, kind: str, tmp_path: Path, cache: Path) -> None:
    packs = kind[0] == "Q"
    kinds = {} if kind != "IQ4_NL" else {"": "Q4_0"}
    source = write_gguf(tmp_path / "tiny.gguf", config_of(family), kind, kinds=kinds)
    if kind == "IQ4_NL":
        relabelled(source, GGMLQuantizationType.Q4_0, GGMLQuantizationType.IQ4_NL)
    folder = gguf_directory(source, cache)
    loaded = build_model(folder, **HERE)
    wanted = logits(by_transformers(source, folder))
    torch.testing.assert_close(logits(loaded.module), wanted, rtol=1e-4, atol=1e-4)
    assert loaded.bytes_by_type.keys() == ({kind, "float32"} if packs else {"float32"})
    if packs:
        stored = GgufFile(source)
        assert (
            loaded.bytes_by_type[kind]
            == stored.kinds[kind]
            == loaded.bytes_read - sum(tensor.nbytes for tensor in stored.tensors.values() if len(tensor.shape) == 1)
        )
        unpack_modules(loaded.module, torch.float32)
        torch.testing.assert_close(logits(loaded.module), wanted, rtol=1e-4, atol=1e-4)


def relabelled(path: Path, old: GGMLQuantizationType, new: GGMLQuantizationType, most: int = 1 << 20) -> None:
    """Give tensors of a file another type, whose blocks are as large."""
    data = bytearray(path.read_bytes())
    reader = GGUFReader(path)
    for tensor in reader.tensors[:most]:
        if tensor.tensor_type == old:
            at = tensor.field.offset + sum(part.nbytes for part in tensor.field.parts[:4])
            assert data[at : at + 4] == struct.pack("<I", old)
            data[at : at + 4] = struct.pack("<I", new)
    path.write_bytes(data)


def test_a_folder_is_written_once(tmp_path: Path, cache: Path) -> None:
    keys = {"tokenizer.chat_template": "{{ messages[0].content }}", "tokenizer.ggml.eot_token_id": 5}
    source = write_gguf(tmp_path / "tiny.gguf", config_of("llama"), "Q8_0", keys=keys)
    folder = gguf_directory(source, cache)
    config = read_config(folder)
    assert config.dtype == torch.bfloat16 and config.num_hidden_layers == 2 and config.vocab_size == VOCAB
    assert read_generation_config(folder).eos_token_id == [0, 5]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("abc").input_ids == [27, 3] and tokenizer.chat_template == keys["tokenizer.chat_template"]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 100_000
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert gguf_directory(source, cache) == folder and (folder / "config.json").stat().st_mtime_ns == stamp
    assert left_in(cache) == [folder.name] and weight_files(folder) == {source.name: source}
    # Another file has another one, and the same at another place.
    write_gguf(source, config_of("llama"), "Q4_0")
    assert gguf_directory(source, cache) != folder
    assert gguf_directory(source.rename(tmp_path / "moved.gguf"), cache).name.startswith("moved-")


def test_parts_of_a_split_file_are_one_model(tmp_path: Path, cache: Path) -> None:
    config = config_of("llama", tie_word_embeddings=True)
    whole = write_gguf(tmp_path / "whole.gguf", config, "Q4_1")
    first = write_gguf(tmp_path / "split.gguf", config, "Q4_1", per_part=7)
    parts = sorted(tmp_path.glob("split-*"))
    assert len(parts) > 2 and first == parts[0]
    expected = logits(build_model(gguf_directory(whole, cache), **HERE).module)
    folder = gguf_directory(parts[1], cache)
    assert torch.equal(logits(build_model(folder, **HERE).module), expected)
    assert weight_files(folder).keys() == {part.name for part in parts}
    parts[1].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(MegaKVError, match=rf"is one of {len(parts)} parts .*{parts[1].name} lies not beside it"):
        gguf_directory(first, cache)
    with pytest.raises(MegaKVError, match=r"is one of \d parts of a split GGUF file: give them their names back"):
        gguf_directory(tmp_path / "elsewhere.gguf", cache)


def test_tied_weights_are_one(tmp_path: Path, cache: Path) -> None:
    for tied in (True, False):
        source = write_gguf(tmp_path / "tiny.gguf", config_of("llama", tie_word_embeddings=tied), "Q5_0")
        model = build_model(gguf_directory(source, cache), **HERE).module
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert isinstance(head, PackedLinear) and isinstance(embedding, PackedEmbedding)
        assert (head.weight is embedding.weight) is tied


@pytest.mark.parametrize(("other", "packed"), [("Q8_0", True), ("Q5_0", False)])
def test_experts_stay_packed_where_their_rows_are_alike(
    other: str, packed: bool, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"ffn_up_exps": other}
    source = write_gguf(tmp_path / "tiny.gguf", config_of("qwen3_moe"), "Q8_0", kinds=kinds)
    folder = gguf_directory(source, cache)
    loaded = build_model(folder, **HERE, progress=True)
    wanted = logits(by_transformers(source, folder))
    torch.testing.assert_close(logits(loaded.module), wanted, rtol=1e-4, atol=1e-4)
    note = "million weights in Q5_0, Q8_0 are unpacked to float32, as nothing here multiplies them"
    assert (note in caplog.text) is not packed
    experts = loaded.module.model.layers[1].mlp.experts
    assert (experts.gate_up_proj.dtype == torch.uint8) is packed
    if packed:
        ranks = [build_model(folder, **HERE, tp_rank=rank, tp_size=2).module.model.layers[1] for rank in range(2)]
        gates = [rank.mlp.experts.gate_up_proj.unflatten(1, (2, -1)) for rank in ranks]
        assert torch.equal(torch.cat(gates, dim=2).flatten(1, 2), experts.gate_up_proj)
        assert torch.equal(torch.cat([rank.mlp.experts.down_proj for rank in ranks], dim=2), experts.down_proj)
        unpack_modules(loaded.module, torch.float32)
        torch.testing.assert_close(logits(loaded.module), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "BF16"])
def test_ranks_read_their_parts(kind: str, tmp_path: Path, cache: Path) -> None:
    config = config_of("llama", 512)
    folder = gguf_directory(write_gguf(tmp_path / "tiny.gguf", config, kind), cache)
    whole = build_model(folder, **HERE)
    ranks = [build_model(folder, **HERE, tp_rank=rank, tp_size=2) for rank in range(2)]
    for name, parameter in whole.module.named_parameters():
        parts = [rank.module.get_parameter(name) for rank in ranks]
        if parts[0].shape != parameter.shape:
            cut = next(dim for dim in range(2) if parts[0].shape[dim] != parameter.shape[dim])
            assert torch.equal(torch.cat(parts, dim=cut), parameter), name
    assert ranks[0].bytes_read < whole.bytes_read


def test_cuts_inside_blocks_are_refused_by_name(tmp_path: Path, cache: Path) -> None:
    folder = gguf_directory(write_gguf(tmp_path / "tiny.gguf", config_of("llama"), "Q4_K"), cache)
    message = (
        r"tp_size = 2 cuts the rows of model\.layers\.0\.self_attn\.o_proj\.weight, 256 weights, inside blocks of "
        r"Q4_K, 256 weights each; sizes that do not: 1; more ranks share the work by megakv\.context_parallel\.size"
    )
    with pytest.raises(ValueError, match=message):
        build_model(folder, **HERE, tp_size=2)


def test_widths_are_cut_at_blocks(tmp_path: Path, cache: Path) -> None:
    """704 is 22 blocks of 32: three ranks have 8, 7 and 7 of them."""
    config = config_of("llama", 192, intermediate_size=704, num_attention_heads=6, num_key_value_heads=3)
    folder = gguf_directory(write_gguf(tmp_path / "tiny.gguf", config, "Q4_0"), cache)
    ranks = [build_model(folder, **HERE, tp_rank=rank, tp_size=3) for rank in range(3)]
    assert [rank.module.model.layers[0].mlp.down_proj.in_features for rank in ranks] == [256, 224, 224]
    assert ranks[0].head_map == contiguous_head_map(2, 6, 3, 3)


def changed(change: Callable[[bytearray, GGUFReader], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data, reader = bytearray(path.read_bytes()), GGUFReader(path)
        path.write_bytes(change(data, reader) or data)

    return apply


def set_type(data: bytearray, reader: GGUFReader) -> None:
    field = next(each.field for each in reader.tensors if each.name == "blk.1.ffn_up.weight")
    at = field.offset + sum(part.nbytes for part in field.parts[:4])
    data[at : at + 4] = struct.pack("<I", 99)


def set_width(data: bytearray, reader: GGUFReader) -> None:
    field = next(each.field for each in reader.tensors if each.name == "blk.1.ffn_up.weight")
    at = field.offset + sum(part.nbytes for part in field.parts[:3])
    data[at : at + 8] = struct.pack("<Q", 250)


def set_scale(data: bytearray, reader: GGUFReader) -> None:
    at = next(each.data_offset for each in reader.tensors if each.name == "blk.1.ffn_up.weight")
    data[at + 34 * 5 : at + 34 * 5 + 2] = b"\x00\x7e"


def rename_head(data: bytearray, reader: GGUFReader) -> bytes:
    size = struct.pack("<Q", len("output.weight"))
    return data.replace(size + b"output.weight", size + b"outputhweight")


def set_number(name: str, value: int) -> Callable[[bytearray, GGUFReader], None]:
    def change(data: bytearray, reader: GGUFReader) -> None:
        field = reader.fields[name]
        at = field.offset + sum(part.nbytes for part in field.parts[:-1])
        data[at : at + 4] = struct.pack("<I", value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_number("qwen2.block_count", 1 << 24), r"has 16777216 layers by its metadata .*, and tensors of 2"),
        (set_number("qwen2.block_count", 1), r"has 1 layers by its metadata \(qwen2\.block_count\), and tensors of 2"),
        (rename_head, r"no output\.weight, and 'outputhweight' of the same shape"),
        (lambda data, reader: data[:-1000], r"is cut short or no GGUF file \(\S+ ends \d+ bytes behind it\)"),
        (lambda data, reader: data[:100], r"is cut short or no GGUF file \(it ends within its header\)"),
        (lambda data, reader: b"no GGUF at all" * 9, r"is cut short or no GGUF file \(it does not begin with GGUF\)"),
        (lambda data, reader: b" ", "is cut short or no GGUF file"),
        (set_type, r"blk\.1\.ffn_up\.weight has type 99, which is none of GGUF's"),
        (set_width, r"blk\.1\.ffn_up\.weight has rows of 250 weights, no whole blocks of Q8_0 of 32"),
        (set_scale, r"blk\.1\.ffn_up\.weight \(Q8_0\) has scales that are no finite numbers; fetch it again"),
    ],
)
def test_broken_files_are_named(change: Any, message: str, tmp_path: Path, cache: Path) -> None:
    source = write_gguf(tmp_path / "broken.gguf", config_of("qwen2"), "Q8_0")
    changed(change)(source)
    with pytest.raises(MegaKVError, match=rf"broken\.gguf.*{message}"):
        build_model(gguf_directory(source, cache), **HERE)
    assert change is set_scale or left_in(cache) == []


def test_sizes_that_no_memory_has(tmp_path: Path, cache: Path) -> None:
    source = write_gguf(tmp_path / "broken.gguf", config_of("qwen2"), "Q8_0")
    changed(set_number("qwen2.feed_forward_length", 0xFF000200))(source)
    with pytest.raises(ValueError, match=r"a model of type 'qwen2' has no sizes by its config that fit|fetch it again"):
        build_model(gguf_directory(source, cache), **HERE)


def test_files_of_less_than_a_model(tmp_path: Path, cache: Path) -> None:
    partial = write_gguf(tmp_path / "partial.gguf", config_of("llama"), "F32", leave_out="blk.1.ffn_up")
    with pytest.raises(MegaKVError, match=r"partial.gguf lacks model.layers.1.mlp.up_proj.weight; fetch it again"):
        build_model(gguf_directory(partial, cache), **HERE)
    with pytest.raises(MegaKVError, match=r"model '\S+absent.gguf': there is no such GGUF file"):
        local_directory(tmp_path / "absent.gguf")
    folder = gguf_directory(write_gguf(tmp_path / "gone.gguf", config_of("llama"), "F32"), cache)
    (tmp_path / "gone.gguf").unlink()
    with pytest.raises(MegaKVError, match=r"gone.gguf cannot be read: No such file"):
        build_model(folder, **HERE)


def test_what_is_quantised_is_not_quantised_again(tmp_path: Path, cache: Path) -> None:
    folder = gguf_directory(write_gguf(tmp_path / "tiny.gguf", config_of("llama"), "Q5_0"), cache)
    message = r"megakv.weights.format = 'int8': \S+tiny\.gguf holds quantised weights already \(Q5_0\); leave it out"
    with pytest.raises(ValueError, match=message):
        build_model(folder, **HERE, weights="int8")


@pytest.mark.parametrize(("factor", "kept"), [(8.0, True), (1.0, False)])
def test_scaled_rotary_embeddings(factor: float, kept: bool, tmp_path: Path, cache: Path) -> None:
    """Llama 3's scaling comes as a tensor alone, which transformers leaves out."""
    original = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = config_of("llama", rope_parameters=original, max_position_embeddings=131072)
    source = write_gguf(tmp_path / "tiny.gguf", config, "Q4_0")
    found = read_config(gguf_directory(source, cache)).rope_parameters
    assert found["rope_type"] == ("llama3" if kept else "default")
    assert not kept or {key: found[key] for key in original} == original


def test_a_full_disk_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", config_of("llama"), "F32")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises(MegaKVError, match=r"tiny.gguf: its config and tokenizer cannot be written into .*cache"):
            gguf_directory(source, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left_in(cache) == []
    # What one that was killed has left goes with the next.
    folder = gguf_directory(source, cache)
    shutil.rmtree(folder)
    (cache / f".{folder.name}.killed").mkdir()
    assert gguf_directory(source, cache) == folder and left_in(cache) == [folder.name]
