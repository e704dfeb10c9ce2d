"""Row-wise FP8: values, scales and products of one linear, and where they are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megakv.engine.config import load_config
from megakv.engine.loading import build_model
from megakv.weights.formats import fp8, settings
from megakv.weights.formats.fp8 import (
    FP8,
    Fp8Linear,
    check_device,
    cpu_product,
    quantise,
    quantise_rows,
    scaled_product,
)
from megakv.weights.tensor_parallel import RowParallelLinear
from tests.families import FAMILIES

# A float8_e4m3fn is off by 2.6% of itself (root mean square), a product of two by 3.7%.
LINEAR_BOUND = 0.042


def unused(tensor: Tensor) -> Tensor:
    raise AssertionError("a rank alone sums nothing")


def dequantised(linear: Fp8Linear) -> Tensor:
    return (linear.weight.double() * linear.weight_scale.t())[: linear.out_features, : linear.in_features]


def quantised(linear: nn.Linear | RowParallelLinear) -> Fp8Linear:
    made = Fp8Linear(linear)
    quantise(made, "weight", linear.weight)
    return made


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
    made = Fp8Linear(nn.Linear(37, 13, bias=False, device="meta"))
    assert made.weight.is_meta and made.weight_scale.is_meta
    quantise(made, "weight", x)
    padded, more = made.weight, made.weight_scale.t()
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


def test_decoding_is_torchs_own() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = every.float().isfinite()
    assert numbers.sum() == 254
    assert torch.equal(fp8._decoded(every)[numbers] * 256, every.float()[numbers])


@pytest.mark.parametrize("chunk", [1, 500, 1 << 20])
def test_product_on_cpu_is_that_of_torchs_kernel(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "CHUNK", chunk)
    sides = [*quantise_rows(torch.randn(5, 72)), *quantise_rows(torch.randn(48, 72))]
    sides[3] = sides[3].t()
    product = cpu_product(*sides)
    wanted = (sides[0].double() * sides[1]) @ (sides[2].double() * sides[3].t()).t()
    torch.testing.assert_close(product.double(), wanted, rtol=1e-5, atol=1e-5)
    try:
        kernel = scaled_product(*sides)
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__} has no row-wise FP8 products on CPU: {str(error).splitlines()[0]}")
    torch.testing.assert_close(kernel, product.bfloat16(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden(value: float) -> None:
    x = torch.randn(3, 32)
    x[1, 5] = value
    found = quantised(nn.Linear(32, 16).requires_grad_(False))(x)
    assert found[0].isfinite().all() and found[2].isfinite().all()
    assert not found[1].isfinite().any()


def test_row_parallel_sums_before_the_bias() -> None:
    weight, bias, x = torch.randn(20, 48), torch.randn(20), torch.randn(3, 48)
    other = torch.randn(3, 20)
    contiguous = []

    def all_reduce(tensor: Tensor) -> Tensor:
        contiguous.append(tensor.is_contiguous())
        return tensor.add_(other)

    made = quantised(RowParallelLinear(weight, bias, all_reduce))
    alone = quantised(nn.Linear(48, 20, bias=False))
    quantise(alone, "weight", weight)
    torch.testing.assert_close(made(x), alone(x) + other + bias)
    # The output of 20 is cut from one of 32.
    assert contiguous == [True] and made.weight.shape == (32, 48)


def test_devices_that_cannot_are_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_device(torch.device("cpu"))
    FAMILIES["llama"]().save_pretrained(tmp_path)
    right = fp8.cpu_product

    def absent(*args: Any) -> Tensor:
        raise NotImplementedError("Could not run 'aten::_scaled_mm'")

    monkeypatch.setattr(fp8, "cpu_product", absent)
    with pytest.raises(ValueError, match=r"cannot be used on cpu: torch .* has no FP8 products there \(Could not run"):
        build_model(tmp_path, dtype=None, weights="fp8", all_reduce=unused)
    monkeypatch.setattr(fp8, "cpu_product", lambda *args: right(*args) * 1.05)
    with pytest.raises(ValueError, match=r"torch .* computes FP8 products wrong there, by 5.0e-02; leave it out"):
        check_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"on cuda:0: NVIDIA A100 has compute capability 8.0, 8.9 or more is needed"):
        check_device(torch.device("cuda:0"))


def test_setting() -> None:
    assert load_config().megakv.weights.format == "as_stored"
    assert load_config({"megakv": {"weights": {"format": "fp8"}}}).megakv.weights.format == "fp8"
    assert settings()[:4] == ("as_stored", "int8", "q4_1", "fp8")
    with pytest.raises(ValueError, match=r"megakv.weights.format = 'int4': allowed: 'as_stored', .*'fp8'"):
        load_config({"megakv": {"weights": {"format": "int4"}}})


def test_values_of_the_format_are_exact() -> None:
    linear = nn.Linear(64, 32).requires_grad_(False)
    values = torch.tensor([448.0, 1.0, -2.0, 0.5]).repeat(16)
    linear.weight[:] = values
    torch.testing.assert_close(quantised(linear)(values), linear(values))
