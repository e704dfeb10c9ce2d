"""The compiled product of few rows against float64, PyTorch's own, and what it leaves to that."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megakv.attention.linear import FEW_ROWS, load_linear
from megakv.base.kernel_build import flags_for
from tests.pairs import without_pairs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ROWS = 400
# Fewer lanes make for longer sums.
UNITS = 1 if "-mavx512f" in next(flags_for(torch.backends.cpu.get_cpu_capability())) else 2


@pytest.fixture
def kernel():
    found, reason = load_linear()
    if found is None:
        pytest.skip(f"no compiled kernel: {reason}")
    return found


@pytest.fixture(params=[False, True], ids=["widened", "pairs"])
def pairs(request):
    if request.param and (reason := without_pairs()):
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def random_weight(outputs, columns, dtype):
    """One of its own, or some rows or columns of a larger one."""
    whole = torch.randn(outputs + 9, columns + 11).to(dtype)
    row, column = torch.randint(9, (2,)).tolist()
    views = (
        whole[:outputs, :columns].clone(),
        whole[row : row + outputs, :columns],
        whole[:outputs, column : column + columns],
    )
    return views[int(torch.randint(3, ()))]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_at_least_as_exact_as_pytorch_s(kernel, dtype, threads, pairs):
    own, torchs, worst = [], [], [[], []]
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        for _ in range(60):
            # Of few rows and of many other loops.
            most_rows = 24 if torch.rand(()) < 0.5 else MOST_ROWS + 1
            most_columns, most_outputs = (700, 300) if torch.rand(()) < 0.9 else (5000, 50)
            rows, columns, outputs = (
                int(torch.randint(1, most, ())) for most in (most_rows, most_columns, most_outputs)
            )
            shape = (1, rows, columns) if rows % 2 else (rows, columns)
            x, weight = torch.randn(shape).to(dtype), random_weight(outputs, columns, dtype)
            bias = torch.randn(outputs).to(dtype) if torch.rand(()) < 0.5 else None
            assert kernel.computes(x, weight, bias) == (rows <= FEW_ROWS)
            assert kernel.computes(x, weight, bias, MOST_ROWS) and kernel.computes(x, weight, bias, None)
            found = pool.submit(kernel, x, weight, bias, pairs=pairs).result()
            assert (found.dtype, found.shape) == (dtype, (*shape[:-1], outputs))
            expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            size = x.double().abs() @ weight.double().abs().t() + 1
            for errors, most, result in zip((own, torchs), worst, (found, F.linear(x, weight, bias)), strict=True):
                error = (result.double() - expected).abs()
                errors.append(error.square().flatten())
                most.append(float((error / size).max()) / torch.finfo(dtype).eps)
    # One of them is within a unit of what it sums up, or hardly further off than PyTorch's worst.
    assert max(worst[0]) <= max(UNITS, 1.5 * max(worst[1]))
    assert torch.cat(own).mean().sqrt() <= 1.05 * torch.cat(torchs).mean().sqrt()


@pytest.mark.parametrize("rows", [3, 20])
def test_long_sums_lose_no_digits(kernel, rows):
    x, weight = torch.rand(rows, 100_003), torch.rand(5, 100_003)
    expected = x.double() @ weight.double().t()
    assert ((kernel(x, weight).double() - expected) / expected).abs().max() < 3e-6


@pytest.mark.parametrize("rows", [3, 20])
def test_of_no_columns_comes_the_bias_alone(kernel, rows):
    x, weight, bias = torch.randn(rows, 0), torch.randn(5, 0), torch.randn(5)
    out = torch.full((rows, 5), torch.nan)
    numbers = rows, 0, weight.data_ptr(), 0, 5, 0, bias.data_ptr(), 5, 0, 1
    assert not kernel._call(0, False, x.data_ptr(), *numbers, out.data_ptr())
    assert torch.equal(out, bias.expand(rows, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_rounded_as_pytorch_rounds(kernel, dtype):
    # Numbers of all sizes, ties, infinities and what is none; one product each, so that nothing but rounding counts.
    bits = torch.cat((torch.randint(-(2**31), 2**31 - 1, (4000,)), torch.arange(-2000, 2000) * 2**15 + 0x3F808000))
    some = bits.to(torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, 1e-8, 6e-8, 65504.0, 65520.0, 3.4e38, torch.inf, -torch.inf, torch.nan])
    weight = torch.cat((some, some * 2.0**-112, some * 2.0**-20, special)).to(dtype)[:, None]
    x = torch.tensor([[1.0], [1.0 + 2**-7], [3.0**-9]]).to(dtype)
    expected = (x.float() @ weight.float().t()).to(dtype)
    found = kernel(x, weight)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_what_it_does_not_compute(kernel):
    x, weight = torch.randn(2, 8), torch.randn(5, 8)
    assert kernel.computes(x, weight, None)
    assert kernel.computes(x, nn.Parameter(weight), torch.randn(5))
    for other in (
        (torch.randn(FEW_ROWS + 1, 8), weight, None),
        (x[:0], weight, None),
        (x.bfloat16(), weight, None),
        (x.double(), weight.double(), None),
        (x, torch.randn(8, 5).t(), None),
        (x, torch.randn(5, 7), None),
        (x, weight, torch.randn(4)),
        (x, weight, torch.randn(5).half()),
        (x, weight.to("meta"), None),
    ):
        assert not kernel.computes(*other)
    with torch.enable_grad():
        assert not kernel.computes(x, weight, None)


def test_rows_of_any_strides(kernel):
    x, weight = torch.randn(7, 40, dtype=torch.float32), torch.randn(9, 40)
    torch.testing.assert_close(kernel(x.t().contiguous().t()[::2], weight), F.linear(x[::2], weight))
