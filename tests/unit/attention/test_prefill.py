"""The compiled kernel for many query rows against the dense float64 reference."""

import ctypes
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megakv.attention import backends
from megakv.attention.prefill import ROUNDED_TOLERANCE, PrefillKernel, load_prefill
from megakv.attention.reference import Alibi, dense_attention
from megakv.base import kernel_build, library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", params=["widened", "pairs"])
def kernel(request):
    found, reason = load_prefill()
    if found is None:
        pytest.skip(f"no compiled kernel: {reason}")
    try:
        return PrefillKernel(library.library("prefill"), pairs=request.param == "pairs")
    except OSError as error:
        pytest.skip(str(error))


def random_case(generator, *, rows, keys, dtype=None):
    """Queries, keys and values of random shape; heads side by side within a token, or one behind the other."""

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    dtype, kv_heads, dim = dtype or pick(*DTYPES), pick(1, 2, 3), pick(1, 3, 16, 20, 64, 80, 96, 128, 192, 256)
    group, value_dim = pick(1, 2, 3, 8), pick(dim, dim, 1, 7, 24, 128)
    q = torch.randn(rows, kv_heads * group, dim, generator=generator).to(dtype).transpose(0, 1)
    if pick(True, False):
        both = torch.randn(keys, kv_heads * (dim + value_dim), generator=generator).to(dtype)
        k = both[:, : kv_heads * dim].unflatten(1, (kv_heads, dim)).transpose(0, 1)
        v = both[:, kv_heads * dim :].unflatten(1, (kv_heads, value_dim)).transpose(0, 1)
    else:
        k = torch.randn(kv_heads, keys + 9, dim, generator=generator).to(dtype)[:, 4 : 4 + keys]
        v = torch.randn(kv_heads, keys, value_dim, generator=generator).to(dtype)
    return q, k, v


def random_ranges(rng, rows, keys):
    """Ranges that move on from row to row, some of them empty."""
    low, high = (np.sort(rng.integers(0, keys + 1, rows)) for _ in range(2))
    visible = (np.arange(keys) >= low[:, None]) & (np.arange(keys) < high[:, None])
    return (low, high), torch.from_numpy(visible)


def assert_close(actual, expected, tolerance=3e-6, rounded=False):
    """Where weights are rounded to bfloat16, outputs differ by a unit or two of its last place, log-sum-exps do not."""
    assert actual[0].dtype == actual[1].dtype == torch.float32
    for found, true, bound in zip(
        actual, expected, (ROUNDED_TOLERANCE if rounded else tolerance, tolerance), strict=True
    ):
        torch.testing.assert_close(found.double(), true, rtol=bound, atol=bound)


@pytest.mark.parametrize("threads", [1, 3])
def test_it_agrees_with_the_reference(kernel, threads):
    generator, rng = torch.Generator().manual_seed(threads), np.random.default_rng(threads)
    shapes = [(1, 1), (1, 300), (63, 64), (64, 1), (65, 63), (130, 257), (5, 0), (0, 5), (200, 129), (17, 500)]
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        for rows, keys in shapes * 3:
            q, k, v = random_case(generator, rows=rows, keys=keys)
            scale, rounded = q.shape[2] ** -0.5, kernel.rounds(q.dtype)
            assert kernel.computes(q, k, v, scale)
            assert_close(pool.submit(kernel, q, k, v, scale).result(), dense_attention(q, k, v, scale), rounded=rounded)
            triangle = torch.ones(rows, keys, dtype=torch.bool).tril()
            expected = dense_attention(q, k, v, scale, visible_LS=triangle)
            assert_close(pool.submit(kernel, q, k, v, scale, causal=True).result(), expected, rounded=rounded)
            ranges, visible = random_ranges(rng, rows, keys)
            masked = pool.submit(kernel, q, k, v, scale, ranges=ranges).result()
            assert_close(masked, dense_attention(q, k, v, scale, visible_LS=visible), rounded=rounded)
            blind = ~visible.any(1)
            assert masked[0][:, blind].eq(0).all()
            assert masked[1][:, blind].eq(-torch.inf).all()


def test_squares_windows_caps_and_biases(kernel):
    generator = torch.Generator().manual_seed(5)
    for size, window in ((1, None), (64, None), (200, None), (333, 40), (150, 1)):
        q, k, v = random_case(generator, rows=size, keys=size)
        high = np.arange(1, size + 1)
        low = np.zeros_like(high) if window is None else np.maximum(high - window, 0)
        visible = torch.from_numpy((high[:, None] > np.arange(size)) & (low[:, None] <= np.arange(size)))
        slots = torch.arange(size) + 900_000
        alibi = Alibi(torch.rand(len(q), generator=generator), slots, slots)
        bias = alibi.slopes_H[:, None, None] * (slots - slots[:, None])
        for softcap, sloped in ((None, False), (2.0, False), (None, True), (1.5, True)):
            given = {"softcap": softcap, "alibi": alibi if sloped else None}
            expected = dense_attention(
                q, k, v, 0.2, visible_LS=visible, softcap=softcap, bias_HLS=bias if sloped else None
            )
            found = kernel(q, k, v, 0.2, ranges=(low, high), **given)
            assert_close(found, expected, 6e-6, rounded=kernel.rounds(q.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_far_apart(kernel, dtype):
    # Weights that underflow to 0, a maximum that comes last, ones that are all alike, and others 100 apart.
    k = torch.zeros(1, 200, 16)
    k[0, :, 0] = torch.linspace(-300, 500, 200)
    v = torch.arange(200.0)[None, :, None].expand(1, 200, 16).contiguous()
    for query in (1.0, -1.0, 0.0, 1e-30, 100 / 4):
        q, k, v = (x.to(dtype) for x in (torch.full((1, 70, 16), query), k, v))
        assert_close(kernel(q, k, v, 1.0), dense_attention(q, k, v, 1.0), 1e-5, rounded=kernel.rounds(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_that_overflow_weigh_nothing(kernel, dtype):
    # A tile, all but the last key, and all of them.
    for keys, overflowing in ((200, 64), (300, 299), (200, 200)):
        q, k = torch.full((2, 70, 16), 1e20).to(dtype), torch.zeros(1, keys, 16).to(dtype)
        k[0, :overflowing] = -1e20
        v = torch.randn(1, keys, 8, generator=torch.Generator().manual_seed(keys)).to(dtype)
        out, lse = kernel(q, k, v, 1.0)
        seen = v[0, overflowing:].double()
        expected = seen.mean(dim=0) if len(seen) else seen.sum(dim=0)
        # Weights are all alike.
        torch.testing.assert_close(out.double(), expected.expand(2, 70, 8), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, torch.tensor(float(len(seen))).log().expand(2, 70))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_a_number_is_not_hidden(kernel, dtype):
    q, k, v = (torch.ones(1, n, 16, dtype=dtype) for n in (66, 300, 300))
    k[0, 130, 3] = torch.nan
    for softcap in (None, 3.0):
        high = np.arange(66) * 2 + 5
        out, lse = kernel(q, k, v, 1.0, ranges=(np.zeros_like(high), high), softcap=softcap)
        sees = torch.from_numpy(high > 130)
        assert sees.any() and not sees.all()
        assert torch.equal(out.isnan().all(-1)[0], sees)
        assert torch.equal(lse.isnan()[0], sees)


@pytest.mark.parametrize("gap", [0.0, 100.0])
def test_errors_of_16_bits(kernel, gap):
    """Against PyTorch's kernel in 16 bits: a hundredth of its error where neither weights nor outputs are rounded to
    them, and no more where weights are.
    """
    generator = torch.Generator().manual_seed(int(gap))
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for group, dim in ((1, 64), (3, 64), (8, 128)):
        q = torch.randn(2 * group, 150, dim, generator=generator)
        k, v = (torch.randn(2, 400, dim, generator=generator) for _ in range(2))
        k[:, 200] += gap / dim * q[::group, 0]
        for dtype in (torch.bfloat16, torch.float16):
            inputs = [x.to(dtype) for x in (q, k, v)]
            scale = 3 * dim**-0.5
            true = dense_attention(*inputs, scale)
            copies = [inputs[0][None], *(x.repeat_interleave(group, 0)[None] for x in inputs[1:])]
            theirs = call(*copies, 0.0, False, scale=scale)
            for own, their, exact in zip(kernel(*inputs, scale), theirs, true, strict=True):
                errors = [(x.double() - exact).square().mean().sqrt().item() for x in (own, their[0])]
                exactly = own.dim() == 3 and not kernel.rounds(dtype)
                assert errors[0] <= (0.01 if exactly else 1.05) * errors[1]


def test_any_strides(kernel):
    generator = torch.Generator().manual_seed(1)
    q, k, v = random_case(generator, rows=70, keys=90)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    rounded = kernel.rounds(q.dtype)
    assert_close(kernel(*strided, 0.25), dense_attention(q, k, v, 0.25), rounded=rounded)
    shared = k[:1].expand(len(k), -1, -1)
    assert_close(kernel(q, shared, v, 0.25), dense_attention(q, shared, v, 0.25), rounded=rounded)


def test_what_it_does_not_compute(kernel):
    q, k = torch.ones(4, 2, 16), torch.ones(2, 9, 16)
    assert kernel.computes(q, k, k, 0.1)
    assert not kernel.computes(q, k, k, 0.0)
    assert not kernel.computes(q.double(), k.double(), k.double(), 0.1)
    assert not kernel.computes(q, k.half(), k, 0.1)
    assert not kernel.computes(q, torch.ones(2, 9, 8), k, 0.1)
    assert not kernel.computes(q, k, k[:, :8], 0.1)


def test_pairs_where_they_pay(monkeypatch, tmp_path):
    if load_prefill()[0] is None:
        pytest.skip("no compiled kernel")
    path = library.library("prefill")
    try:
        PrefillKernel(path, pairs=True)
    except OSError:
        assert not PrefillKernel(path).pairs
        pytest.skip("a processor or a compiler without products of bfloat16 pairs")
    for gain, pairs in ((1.09, False), (1.11, True)):
        monkeypatch.setattr(PrefillKernel, "_gain", lambda self, gain=gain: gain)
        assert PrefillKernel(path).pairs == pairs
    # A compiler that does not know them.
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *avx512bf16*) exit 1;; esac\nexec {shutil.which("c++")} "$@" -O1\n')
    compiler.chmod(0o755)
    monkeypatch.setattr("torch.utils.cpp_extension.get_cxx_compiler", lambda: str(compiler))
    monkeypatch.setattr(library, "extensions_folder", lambda: tmp_path)
    without = library.library("prefill")
    assert not PrefillKernel(without).pairs
    with pytest.raises(OSError, match="no products of bfloat16 pairs"):
        PrefillKernel(without, pairs=True)


def test_attention_goes_through_it(monkeypatch):
    if load_prefill()[0] is None:
        pytest.skip("no compiled kernel")
    monkeypatch.setattr(backends, "cpu_flash", None)
    monkeypatch.setattr(backends, "math", None)
    q, k = torch.randn(4, 70, 16), torch.randn(2, 70, 16)
    visible = torch.ones(70, 70, dtype=torch.bool).tril()
    for softcap in (None, 3.0):
        actual = backends.attend_block(q, k, k, 0.3, causal=True, softcap=softcap)
        assert_close(actual, dense_attention(q, k, k, 0.3, visible_LS=visible, softcap=softcap))


def test_powers_of_two(tmp_path):
    """Numbers between the smallest normal one and 2^127: two and a half units of the last place at most."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler in the path")
    source = kernel_build.SOURCES / "vectors.h"
    text = f"""
        #include "{source}"
        extern "C" void powers(const float* x, float* y, long n) {{
          for (long i = 0; i < n; i += LANES) store(y + i, power_of_two(load(x + i)));
        }}
    """
    (tmp_path / "powers.cpp").write_text(text)
    capability = torch.backends.cpu.get_cpu_capability()
    for level in {"AVX2", "AVX512", "none"} if capability.startswith("AVX512") else {"none"}:
        flags = (*kernel_build.FLAGS, *kernel_build.VECTORS.get(level, ()))
        call = ctypes.CDLL(str(kernel_build.compiled(tmp_path / "powers.cpp", tmp_path, compiler, flags))).powers
        x = np.random.default_rng(0).uniform(-126, 0, 1 << 16).astype(np.float32)
        x[:8] = 0.0, -0.0, -1.0, -126.0, -0.5, -1e-30, -125.99999, -3e-8
        y = np.empty_like(x)
        call(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_long(len(x)))
        true = np.exp2(x.astype(np.float64))
        assert (np.abs(y - true) / np.spacing(true.astype(np.float32))).max() <= 2.5
