"""Models with FP8 feed-forward layers: near the unquantised ones, half the bytes, on any tensor-parallel degree."""

import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from megakv.engine.loading import build_model
from megakv.weights.checkpoint import CheckpointWeights
from megakv.weights.formats.fp8 import FP8, Fp8Format, Fp8Linear, feed_forward_linears, quantise_rows
from megakv.weights.placement.plan import decoder_layers
from megakv.weights.placement.slices import SliceSpec, split_width
from megakv.weights.sources import ModuleWeights, WeightSource
from tests.families import FAMILIES, NEEDS_SUBSTITUTE, VOCAB, llama
from tests.shards import ThreadRanks

EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
DENSE = [name for name in FAMILIES if name not in EXPERTS]
# Relative root mean square. A float8_e4m3fn is off by 2.6% of itself, so gate * up * down by 6.4%. The tiny families'
# random layers outweigh their embeddings: most of that is in their logits, 0.045 to 0.094 measured over three seeds.
# A trained model's residual stream is larger: the passkey model's logits are off by 0.020.
FAMILY_BOUND = 0.12
TRAINED_BOUND = 0.03
RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "passkey"


def unused(tensor: Tensor) -> Tensor:
    raise AssertionError("a rank alone sums nothing")


def rms_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.detach().double().norm())


def dequantised(linear: Fp8Linear) -> Tensor:
    return (linear.weight.double() * linear.weight_scale.t())[: linear.out_features, : linear.in_features]


def save(name: str, directory: Path) -> PreTrainedModel:
    """A random model of a family, written out; biases moved off zero."""
    model = AutoModelForCausalLM.from_config(FAMILIES[name]()).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("name", DENSE)
def test_logits_of_families_stay_near(name: str, tmp_path: Path) -> None:
    whole = save(name, tmp_path)
    ids = torch.randint(1, VOCAB, (2, 64))
    loaded = build_model(tmp_path, dtype=None, weights="fp8", all_reduce=unused)
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
    plain, small = (build_model(tmp_path, dtype=None, weights=kind, all_reduce=unused) for kind in ("as_stored", "fp8"))
    weights = 2 * 3 * 128 * 512
    scales = 2 * (512 + 512 + 128) * 4
    assert plain.bytes_kept - small.bytes_kept == weights * 2 - (weights + scales)
    assert weights + scales < 0.52 * weights * 2
    assert small.bytes_read == plain.bytes_read


@pytest.mark.parametrize("given", [False, True], ids=["checkpoint", "module"])
def test_no_unquantised_copy_is_ever_held(given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AutoModelForCausalLM.from_config(llama()).save_pretrained(tmp_path)
    copies: list[weakref.ref[Tensor]] = []
    read, most = 0, 0
    make = Fp8Format.make

    def making(self: Fp8Format, owners: Any, part: Tensor, homes: Any) -> None:
        copies.append(weakref.ref(part))
        make(self, owners, part, homes)

    def watch(source: type[WeightSource]) -> None:
        original = source.read

        def reading(self: WeightSource, name: str, spec: SliceSpec) -> Tensor:
            nonlocal read, most
            if "mlp" in name:
                read, most = read + 1, max(most, sum(copy() is not None for copy in copies))
            return original(self, name, spec)

        monkeypatch.setattr(source, "read", reading)

    monkeypatch.setattr(Fp8Format, "make", making)
    for source in (CheckpointWeights, ModuleWeights):
        watch(source)
    model = AutoModelForCausalLM.from_pretrained(tmp_path) if given else tmp_path
    build_model(model, dtype=torch.bfloat16, weights="fp8", all_reduce=unused)
    assert read == len(copies) == 6 and most == 0
    assert all(copy() is None for copy in copies)


@pytest.mark.parametrize("name", [n for n in DENSE if n not in NEEDS_SUBSTITUTE])
def test_tensor_parallel_ranks_differ_by_rounding_only(name: str, tmp_path: Path) -> None:
    whole = save(name, tmp_path)
    ids = torch.randint(1, VOCAB, (2, 33))
    exact = logits(whole, ids)
    alone = logits(build_model(tmp_path, dtype=None, weights="fp8", all_reduce=unused).module, ids)
    shards = ThreadRanks(tmp_path, 2, weights="fp8")
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
    whole = build_model(tmp_path, dtype=None, weights="fp8", all_reduce=unused).module.model.layers[1].mlp
    parts = [rank.module.model.layers[1].mlp for rank in ThreadRanks(tmp_path, 2, weights="fp8").ranks]
    for name in ("gate_proj", "up_proj"):
        joined = torch.cat([getattr(part, name).weight.float() for part in parts])
        assert torch.equal(joined, getattr(whole, name).weight.float())
        scales = torch.cat([getattr(part, name).weight_scale for part in parts], dim=1)
        assert torch.equal(scales, getattr(whole, name).weight_scale)


def test_random_weights_are_quantised_too(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    ids = torch.randint(1, VOCAB, (2, 21))
    plain, small = (
        logits(build_model(tmp_path, dtype=None, load="random", seed=3, weights=kind, all_reduce=unused).module, ids)
        for kind in ("as_stored", "fp8")
    )
    assert 1e-3 < rms_error(small, plain) < FAMILY_BOUND
    for got in ThreadRanks(tmp_path, 2, load="random", seed=3, weights="fp8").logits(ids):
        assert rms_error(got, plain) < FAMILY_BOUND


def test_passkey_model_still_finds_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    from task import MODEL_DIR, is_correct, load_tokenizer, prompt

    try:
        tokenizer = load_tokenizer()
        plain, small = (
            build_model(MODEL_DIR, dtype=None, weights=kind, all_reduce=unused).module for kind in ("as_stored", "fp8")
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


def of_quantised(x: Tensor, weight: Tensor, parts: int = 1) -> Tensor:
    """Rows times a weight ``[out, in]``, both as in row-wise FP8; parts of the inputs have scales of their own."""

    def back(rows: Tensor) -> Tensor:
        values, scales = quantise_rows(rows)
        return (values.double() * scales)[:, : rows.shape[1]]

    cuts = [slice(*split_width(x.shape[1], parts, part)) for part in range(parts)]
    return torch.stack([back(x[:, cut]) @ back(weight[:, cut]).t() for cut in cuts]).sum(0)


def experts_of_quantised(experts: Any, x: Tensor, index: Tensor, share: Tensor, parts: int = 1) -> Tensor:
    """What a module with unquantised experts would give with their weights and all inputs in FP8, token by token.

    The inner width is cut into `parts`, as on tensor-parallel ranks.
    """
    gate_up, down = (w.mT if experts.is_transposed else w for w in (experts.gate_up_proj, experts.down_proj))
    biases = getattr(experts, "gate_up_proj_bias", None), getattr(experts, "down_proj_bias", None)
    found = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(index[token].tolist(), share[token], strict=True):
            inner = of_quantised(x[token : token + 1], gate_up[expert])
            inner = experts._apply_gate((inner if biases[0] is None else inner + biases[0][expert]).float())
            out = of_quantised(inner, down[expert], parts)
            found[token] += weight * (out if biases[1] is None else out + biases[1][expert])[0]
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_those_of_their_quantised_weights(name: str, tmp_path: Path) -> None:
    whole = save(name, tmp_path)
    loaded = build_model(tmp_path, dtype=None, weights="fp8", all_reduce=unused)
    old, new = whole.state_dict(), loaded.module.state_dict()
    in_fp8 = {key for key, tensor in new.items() if tensor.dtype == FP8}
    assert set(new) - set(old) == {f"{key}_scale" for key in in_fp8} and set(old) <= set(new)
    assert {key for key in old if key.endswith(("experts.gate_up_proj", "experts.down_proj"))} <= in_fp8
    assert all(torch.equal(new[key], old[key]) for key in old if key not in in_fp8)
    assert not any(part in key for key in in_fp8 for part in ("attn", "router", "mlp.gate.", "bias"))
    shards = ThreadRanks(tmp_path, 2, weights="fp8")
    layer = whole.config.num_hidden_layers - 1
    experts = whole.model.layers[layer].mlp.experts
    # One is chosen by nobody, another by nearly all.
    index = torch.stack([torch.zeros(21, dtype=torch.int64), torch.randint(2, 4, (21,))], dim=1)
    index[3] = torch.tensor([3, 2])
    x, share = torch.randn(21, whole.config.hidden_size), torch.rand(21, 2)

    def answer(module: Any) -> Tensor:
        found: Tensor = module.model.layers[layer].mlp.experts(x, index, share)
        return found

    # Where a sum is rounded otherwise an FP8 value may tip over.
    assert rms_error(answer(loaded.module), experts_of_quantised(experts, x, index, share)) < 3e-3
    first, second = shards.each(answer)
    assert torch.equal(first, second)
    assert rms_error(first, experts_of_quantised(experts, x, index, share, parts=2)) < 3e-3
    assert 0.01 < rms_error(first, experts(x, index, share)) < FAMILY_BOUND
    assert torch.equal(*shards.logits(torch.randint(1, VOCAB, (2, 33))))


def test_experts_that_are_stored_otherwise_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["mixtral"]())
    model.model.layers[1].mlp.experts.has_gate = False
    with pytest.raises(ValueError, match=r"weights.format = 'fp8' .*'mixtral': MixtralExperts stores.*leave it out"):
        build_model(model, dtype=None, weights="fp8", all_reduce=unused)


def test_layers_without_linears_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=50))
    with pytest.raises(ValueError, match="'gpt2': GPT2Block has no linear outside its attention; leave it out"):
        build_model(model, dtype=None, weights="fp8", all_reduce=unused)
