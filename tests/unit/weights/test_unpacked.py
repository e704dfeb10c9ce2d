"""Weights that are unpacked as they are read: exact, in any part, and refused where a folder is not what it says."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megakv.base.errors import MegaKVError
from megakv.engine.loading import build_model
from megakv.weights.formats.fp8_blocks import Fp8BlocksFormat
from megakv.weights.formats.mxfp4 import Mxfp4Format
from megakv.weights.formats.packed_integers import AwqFormat, GptqFormat
from megakv.weights.lazy import LazyTensor, from_tensor
from megakv.weights.placement.slices import SliceSpec
from tests.quantised_folders import MAKERS, awq, fp8_blocks, gptq, mxfp4, plain_model, write

NAME = "a.experts.down_proj"


def lazy(stored: dict[str, Tensor], ends: Any) -> dict[str, LazyTensor]:
    """Stored tensors by the ends of their keys."""
    return {next((end for end in ends if key.endswith(end)), ""): from_tensor(value) for key, value in stored.items()}


def check_parts(found: LazyTensor, expected: Tensor) -> None:
    """Any ranges along any dimension are those of the whole weight."""
    assert tuple(found.shape) == tuple(expected.shape)
    assert torch.equal(found.whole(), expected)
    for dim, size in enumerate(expected.shape):
        for _ in range(4):
            cuts = sorted(random.sample(range(size + 1), min(4, size + 1) // 2 * 2))
            spec = SliceSpec(dim, tuple(zip(cuts[::2], cuts[1::2], strict=True)))
            assert torch.equal(found.read(dim, spec.ranges or ()), spec.take(expected)), spec


def test_fp8_squares_at_the_edges_are_smaller() -> None:
    block = random.choice([16, 32])
    weight = torch.randn(random.randint(1, 100), random.randint(1, 100))
    form = Fp8BlocksFormat()
    form.configure({"weight_block_size": [block, block]})
    stored = fp8_blocks(NAME, weight, block)
    scales = stored[f"{NAME}_scale_inv"].repeat_interleave(block, 0).repeat_interleave(block, 1)
    expected = stored[NAME].float() * scales[: len(weight), : weight.shape[1]]
    check_parts(form.unpack(NAME, lazy(stored, form.ends)), expected)
    assert torch.allclose(expected, weight, atol=0.3)


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]])])
def test_fp8_with_one_scale(scale: Tensor) -> None:
    values = torch.randn(24, 40).to(torch.float8_e4m3fn)
    parts = {"": from_tensor(values), "_scale_inv": from_tensor(scale)}
    check_parts(Fp8BlocksFormat().unpack(NAME, parts), values.float() * 0.5)


def test_fp8_experts_and_scales_that_are_exponents() -> None:
    values = torch.randn(3, 64, 96).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 130, (3, 64, 3), dtype=torch.uint8)
    expected = values.float() * (exponents.float() - 127).exp2().repeat_interleave(32, 2)
    check_parts(
        Fp8BlocksFormat().unpack(NAME, {"": from_tensor(values), "_scale_inv": from_tensor(exponents)}), expected
    )


def test_mxfp4_numbers() -> None:
    weight = torch.randn(3, 32 * random.randint(1, 4), random.randint(1, 20))
    stored = mxfp4(NAME, weight)
    blocks, scales = stored[f"{NAME}_blocks"], stored[f"{NAME}_scales"]
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    both = torch.stack([numbers[(blocks & 15).int()], numbers[(blocks >> 4).int()]], -1).flatten(-2)
    expected = (both * (scales.float() - 127).exp2().unsqueeze(-1)).flatten(-2).mT
    check_parts(Mxfp4Format().unpack(NAME, lazy(stored, Mxfp4Format.ends)), expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_inputs_of_any_group(bits: int) -> None:
    inputs, outputs, groups = 64, 8 * random.randint(1, 5) * 4, 4
    codes = torch.randint(0, 1 << bits, (inputs, outputs))
    zeros, scales = torch.randint(0, (1 << bits) - 1, (groups, outputs)), torch.rand(groups, outputs)
    index = torch.randint(0, groups, (inputs,), dtype=torch.int32)
    parts = {
        ".qweight": words(codes, 0, bits),
        ".qzeros": words(zeros, 1, bits),
        ".scales": scales,
        ".g_idx": index,
    }
    expected = ((codes - zeros[index.long()] - 1) * scales[index.long()]).t()
    form = GptqFormat()
    form.configure({"bits": bits})
    check_parts(form.unpack(NAME, {end: from_tensor(part) for end, part in parts.items()}), expected)


def words(numbers: Tensor, dim: int, bits: int) -> Tensor:
    """Numbers of some bits, packed one by one."""
    packed = numbers.movedim(dim, -1).unflatten(-1, (-1, 32 // bits))
    word = torch.zeros(packed.shape[:-1], dtype=torch.int64)
    for place in range(32 // bits):
        word |= packed[..., place] << (bits * place)
    return word.where(word < 2**31, word - 2**32).to(torch.int32).movedim(-1, dim).contiguous()


def test_gptq_and_awq_store_the_same_numbers() -> None:
    weight = torch.randn(64, 96)
    found = [
        form.unpack(NAME, lazy(pack("a.weight", weight), form.ends)).whole()
        for form, pack in ((GptqFormat(), gptq), (AwqFormat(), awq))
        if form.configure({}) is None
    ]
    assert torch.equal(*found)
    assert torch.allclose(found[0], weight, atol=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fp8") / "model"
    MAKERS["fp8 blocks"]("qwen3", place)
    return place


def test_a_rank_holds_what_transformers_unpacks(folder: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    loaded = build_model(folder, dtype=torch.bfloat16, all_reduce=lambda x: x)
    found = loaded.module.state_dict()
    # transformers leaves what is not quantised in the type in which it is stored.
    assert all(torch.equal(found[name], value.to(torch.bfloat16)) for name, value in expected.items())
    assert not hasattr(loaded.module.config, "quantization_config")
    half = build_model(folder, dtype=torch.bfloat16, tp_size=2, tp_rank=1, all_reduce=lambda x: x)
    up = half.module.model.layers[0].mlp.up_proj.weight
    assert torch.equal(up, expected["model.layers.0.mlp.up_proj.weight"][128:])
    # No more is read than is kept.
    assert half.bytes_read < 0.75 * loaded.bytes_read


Q, S = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight_scale_inv"
BROKEN: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "NaN": ({S: torch.tensor([[float("nan")]])}, f"{S} holds NaN or infinity; fetch"),
    "shape": ({S: torch.ones(3, 1)}, rf"q_proj.weight cannot be unpacked as fp8: .* {S} \[3, 1\]"),
    "weight": ({Q: None}, f"{Q} cannot be unpacked as fp8: its weight is missing"),
    "type": ({Q: torch.ones(128, 128, dtype=torch.float64).to(torch.complex64)}, "has type C64"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_folders_are_refused_before_weights_are_read(what: str, folder: Path, tmp_path: Path) -> None:
    changed, message = BROKEN[what]
    stored = load_file(folder / "model.safetensors") | changed
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    write(tmp_path, {key: value for key, value in stored.items() if value is not None})
    with pytest.raises(MegaKVError, match=message):
        build_model(tmp_path, dtype=torch.float32, all_reduce=lambda x: x)


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "gptq", "awq", "compressed-tensors", "bitsandbytes"])
def test_a_config_that_quantises_plain_tensors(method: str, tmp_path: Path) -> None:
    plain_model("llama", torch.float32).save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    settings: dict[str, Any] = {"quant_method": method}
    if method == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        settings |= {"format": "pack-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": {}}}}
    if method == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
        settings |= {"load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(described | {"quantization_config": settings}))
    with pytest.raises(MegaKVError, match=r"says that weights are quantised \(.*\), but they are stored plain"):
        build_model(tmp_path, dtype=torch.float32, all_reduce=lambda x: x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "nothing"}, "quantization_config of 'nothing' cannot be used on cpu: Unknown quantization"),
        ({"quant_method": "hqq"}, "'hqq': transformers loads no such checkpoint; load the module by that package"),
        ({"quant_method": "aqlm"}, "'aqlm': .*pip install"),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version = 'gemv' is not supported"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, "a"]}, r"weight_block_size = \[0, 'a'\] is not supported"),
    ],
)
def test_configs_that_are_refused(settings: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises((MegaKVError, ValueError), match=message):
        build_model(tmp_path, dtype=torch.float32, all_reduce=lambda x: x)


def test_what_would_quantise_twice_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"megakv.weights.format = 'fp8': .* holds quantised weights already \(fp8\)"):
        build_model(folder, dtype=torch.float32, weights="fp8", all_reduce=lambda x: x)
