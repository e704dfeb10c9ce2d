"""Row-wise FP8 feed-forward layers: their arithmetic exactly, their effect on logits within measured bounds."""

import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from megakv import fp8, loading
from megakv.config import load_config
from megakv.fp8 import FP8, Fp8Linear, check_device, feed_forward_linears, quantise_rows
from megakv.loading import build_model
from megakv.placement.plan import decoder_layers
from megakv.tensor_parallel import RowParallelLinear
from tests.families import FAMILIES, NEEDS_SUBSTITUTE, TP_REFUSED, VOCAB, llama
from tests.shards import ThreadRanks

EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
DENSE = [name for name in FAMILIES if name not in EXPERTS]
# Relative root mean square. A float8_e4m3fn is off by 2.6% of itself, a product of two by 3.7%, of gate * up * down by
# 6.4%. The tiny families' random layers outweigh their embeddings, so most of that is in their logits: 0.045 to 0.098
# measured over three seeds. A trained model's residual stream is larger: the passkey model's logits are off by 0.020.
LINEAR_BOUND = 0.042
FAMILY_BOUND = 0.12
TRAINED_BOUND = 0.03
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "passkey"


def unused(tensor: Tensor) -> Tensor:
    raise AssertionError("a rank alone sums nothing")


def rms_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.detach().double().norm())


def dequantised(linear: Fp8Linear) -> Tensor:
    return (linear.weight.double() * linear.weight_scale.t())[: linear.out_features, : linear.in_features]


def quantised(linear: nn.Linear | RowParallelLinear) -> Fp8Linear:
    made = Fp8Linear(linear)
    made.quantise(linear.weight)
    return made


def save(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of a family, written out; biases moved off zero."""
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=dtype).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1, 200, 1 << 20])
def test_rows_come_back_within_half_a_step(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "CHUNK", chunk)
    x = (torch.randn(13, 37) * torch.logspace(-3, 3, 13)[:, None]).to(dtype)
    x[4] = 0
    values, scales = quantise_rows(x)
    assert values.dtype == FP8 and values.shape == (13, 48) and scales.shape == (13, 1)
    assert torch.equal(values[:, 37:].float(), torch.zeros(13, 11))
    assert values[4].float().abs().max() == 0
    largest = values.float().abs().amax(-1)
    assert set(largest.tolist()) == {0.0, 448.0}
    # 3 bits after the leading one, and below 2^-6 steps of 2^-9.
    step = torch.maximum(x.double().abs() * 2**-3, scales.double() * 2**-9)
    back = values[:, :37].double() * scales
    assert ((back - x.double()).abs() <= 0.5001 * step).all()
    padded, more = quantise_rows(x, multiple=16)
    assert padded.shape == (16, 48) and more.shape == (16, 1)
    assert torch.equal(padded[:13].float(), values.float()) and torch.equal(more[:13], scales)
    assert padded[13:].float().abs().max() == 0


@pytest.mark.parametrize("size", [1e-45, 1e-39, 3e-38, 1e38])
def test_extreme_rows_stay_finite(size: float) -> None:
    values, scales = quantise_rows(torch.randn(50, 16).clamp(-3, 3) * size)
    assert values.float().isfinite().all() and (scales > 0).all() and scales.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (37, 97), (1, 1), (352, 128)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_the_product_of_its_quantised_sides(
    dtype: torch.dtype, inputs: int, outputs: int, bias: bool
) -> None:
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    made = quantised(linear)
    assert made.weight.dtype == FP8 and not made.weight.requires_grad and made.bias is linear.bias
    assert [name for name in made.state_dict() if name != "bias"] == ["weight", "weight_scale"]
    x = torch.randn(2, 5, inputs).to(dtype)
    values, scales = quantise_rows(x.reshape(10, inputs))
    wanted = (values[:, :inputs].double() * scales) @ dequantised(made).t()
    wanted = wanted.view(2, 5, outputs) + (0 if linear.bias is None else linear.bias.double())
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 2e-6)
    got = made(x)
    assert got.dtype == dtype and got.shape == (2, 5, outputs)
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
    torch.testing.assert_close(made(x[1, 3]), got[1, 3], rtol=tolerance, atol=tolerance)


def test_error_of_one_linear_is_that_of_the_format() -> None:
    linear = nn.Linear(500, 300, bias=False).requires_grad_(False)
    nn.init.normal_(linear.weight)
    x = torch.randn(200, 500) * torch.logspace(-2, 2, 200)[:, None]
    per_row = (quantised(linear)(x) - linear(x)).norm(dim=-1) / linear(x).norm(dim=-1)
    assert 0.03 < float(per_row.mean()) < LINEAR_BOUND


def test_row_parallel_sums_before_the_bias() -> None:
    weight, bias, x = torch.randn(20, 48), torch.randn(20), torch.randn(3, 48)
    other = torch.randn(3, 20)
    contiguous = []

    def all_reduce(tensor: Tensor) -> Tensor:
        contiguous.append(tensor.is_contiguous())
        return tensor.add_(other)

    made = quantised(RowParallelLinear(weight, bias, all_reduce))
    alone = quantised(nn.Linear(48, 20, bias=False))
    alone.quantise(weight)
    torch.testing.assert_close(made(x), alone(x) + other + bias)
    # The output of 20 is cut from one of 32.
    assert contiguous == [True] and made.weight.shape == (32, 48)


@pytest.mark.parametrize("name", DENSE)
def test_logits_of_families_stay_near(name: str, tmp_path: Path) -> None:
    whole = save(name, tmp_path)
    ids = torch.randint(1, VOCAB, (2, 64))
    loaded = build_model(tmp_path, dtype=None, feed_forward="fp8", all_reduce=unused)
    converted = [m for m in loaded.module.modules() if isinstance(m, Fp8Linear)]
    _, layers = decoder_layers(whole)
    linears = [getattr(*found) for layer in layers for found in feed_forward_linears(layer)]
    assert len(converted) == len(linears) >= 2 * len(layers)
    for made, linear in zip(converted, linears, strict=True):
        assert rms_error(dequantised(made), linear.weight.detach()) < 0.03
    # The same names, one more for each weight; attention, embeddings and head as they were.
    old, new = whole.state_dict(), loaded.module.state_dict()
    assert set(new) - set(old) == {f"{name}_scale" for name, tensor in new.items() if tensor.dtype == FP8}
    assert all(torch.equal(new[name], old[name]) for name in old if new[name].dtype != FP8)
    assert set(old) <= set(new) and not any("attn" in name and new[name].dtype == FP8 for name in new)
    assert 0.01 < rms_error(logits(loaded.module, ids), logits(whole, ids)) < FAMILY_BOUND


def test_bytes_halve(tmp_path: Path) -> None:
    wide = llama(hidden_size=128, intermediate_size=512, head_dim=16)
    AutoModelForCausalLM.from_config(wide, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plain, small = (
        build_model(tmp_path, dtype=None, feed_forward=kind, all_reduce=unused) for kind in ("dtype", "fp8")
    )
    weights = 2 * 3 * 128 * 512
    scales = 2 * (512 + 512 + 128) * 4
    assert plain.bytes_kept - small.bytes_kept == weights * 2 - (weights + scales)
    assert weights + scales < 0.52 * weights * 2
    assert small.bytes_read == plain.bytes_read


@pytest.mark.parametrize("given", [False, True], ids=["checkpoint", "module"])
def test_no_unquantised_copy_is_ever_held(given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AutoModelForCausalLM.from_config(llama()).save_pretrained(tmp_path)
    read: list[weakref.ref[Tensor]] = []
    most = 0
    local = loading._local

    def watched(source: Any, name: str, *arguments: Any) -> Tensor:
        nonlocal most
        if "mlp" not in name:
            return local(source, name, *arguments)
        most = max(most, sum(reference() is not None for reference in read))
        tensor = local(source, name, *arguments)
        read.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(loading, "_local", watched)
    model = AutoModelForCausalLM.from_pretrained(tmp_path) if given else tmp_path
    build_model(model, dtype=torch.bfloat16, feed_forward="fp8", all_reduce=unused)
    assert len(read) == 6 and most == 0
    assert all(reference() is None for reference in read)


@pytest.mark.parametrize("name", [n for n in DENSE if n not in TP_REFUSED and n not in NEEDS_SUBSTITUTE])
def test_tensor_parallel_ranks_differ_by_rounding_only(name: str, tmp_path: Path) -> None:
    whole = save(name, tmp_path)
    ids = torch.randint(1, VOCAB, (2, 33))
    exact = logits(whole, ids)
    alone = logits(build_model(tmp_path, dtype=None, feed_forward="fp8", all_reduce=unused).module, ids)
    shards = ThreadRanks(tmp_path, 2, feed_forward="fp8")
    first, second = shards.logits(ids)
    assert torch.equal(first, second)
    # A rank scales its own slice of the activations, so other values are rounded: another error of the same size.
    assert rms_error(first, exact) < FAMILY_BOUND
    assert rms_error(first, alone) < FAMILY_BOUND
    for loaded in shards.ranks:
        for made in loaded.module.modules():
            if isinstance(made, Fp8Linear):
                assert made.weight.shape[0] % 16 == made.weight.shape[1] % 16 == 0


def test_column_shards_hold_the_rows_of_the_whole(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(llama(intermediate_size=96)).save_pretrained(tmp_path)
    whole = build_model(tmp_path, dtype=None, feed_forward="fp8", all_reduce=unused).module.model.layers[1].mlp
    parts = [rank.module.model.layers[1].mlp for rank in ThreadRanks(tmp_path, 2, feed_forward="fp8").ranks]
    for name in ("gate_proj", "up_proj"):
        joined = torch.cat([getattr(part, name).weight.float() for part in parts])
        assert torch.equal(joined, getattr(whole, name).weight.float())
        scales = torch.cat([getattr(part, name).weight_scale for part in parts], dim=1)
        assert torch.equal(scales, getattr(whole, name).weight_scale)


def test_random_weights_are_quantised_too(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    ids = torch.randint(1, VOCAB, (2, 21))
    plain, small = (
        logits(
            build_model(tmp_path, dtype=None, load="random", seed=3, feed_forward=kind, all_reduce=unused).module, ids
        )
        for kind in ("dtype", "fp8")
    )
    assert 1e-3 < rms_error(small, plain) < FAMILY_BOUND
    for got in ThreadRanks(tmp_path, 2, load="random", seed=3, feed_forward="fp8").logits(ids):
        assert rms_error(got, plain) < FAMILY_BOUND


def test_passkey_model_still_finds_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    from task import MODEL_DIR, is_correct, load_tokenizer, prompt

    try:
        tokenizer = load_tokenizer()
        plain, small = (
            build_model(MODEL_DIR, dtype=None, feed_forward=kind, all_reduce=unused).module for kind in ("dtype", "fp8")
        )
        correct = []
        for index in range(8):
            document = prompt(512, (index + 0.5) / 8, np.random.default_rng(index), tokenizer)
            ids = torch.tensor([document.ids])
            found = small.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            correct.append(is_correct(tokenizer.decode(found[0, ids.shape[1] :]), document.number))
            assert rms_error(logits(small, ids), logits(plain, ids)) < TRAINED_BOUND
        # 48 of 48 prompts of 256 to 2,048 tokens when this was written, all with the unquantised model's tokens.
        assert sum(correct) >= 7, correct
    finally:
        for name in ("task", "prose"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_refused(name: str) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES[name]())
    with pytest.raises(ValueError, match=rf"feed_forward = 'fp8' .*{model.config.model_type}.*experts.*use 'dtype'"):
        build_model(model, dtype=None, feed_forward="fp8", all_reduce=unused)


def test_layers_without_linears_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=50))
    with pytest.raises(ValueError, match="'gpt2': GPT2Block has no linear outside its attention; use 'dtype'"):
        build_model(model, dtype=None, feed_forward="fp8", all_reduce=unused)


def test_devices_that_cannot_are_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_device(torch.device("cpu"))
    scaled_mm = torch._scaled_mm

    def absent(*args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("Could not run 'aten::_scaled_mm'")

    monkeypatch.setattr(torch, "_scaled_mm", absent)
    with pytest.raises(ValueError, match=r"cannot be used on cpu: torch .* has no FP8 products there \(Could not run"):
        build_model(tmp_path, dtype=None, feed_forward="fp8", all_reduce=unused)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: scaled_mm(*args, **kwargs) * 1.05)
    with pytest.raises(ValueError, match=r"torch .* computes FP8 products wrong there, by 5.0e-02; use 'dtype'"):
        check_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"on cuda:0: NVIDIA A100 has compute capability 8.0, 8.9 or more is needed"):
        check_device(torch.device("cuda:0"))


def test_setting() -> None:
    assert load_config().megakv.feed_forward == "dtype"
    assert load_config({"megakv": {"feed_forward": "fp8"}}).megakv.feed_forward == "fp8"
    with pytest.raises(ValueError, match=r"megakv.feed_forward = 'int4': allowed: 'dtype' or 'fp8'"):
        load_config({"megakv": {"feed_forward": "int4"}})


def test_values_of_the_format_are_exact() -> None:
    linear = nn.Linear(64, 32).requires_grad_(False)
    values = torch.tensor([448.0, 1.0, -2.0, 0.5]).repeat(16)
    linear.weight[:] = values
    torch.testing.assert_close(quantised(linear)(values), linear(values))
