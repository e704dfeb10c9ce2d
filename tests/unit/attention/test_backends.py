"""Every CPU backend against the dense float64 reference."""

import pytest
import torch

from megakv.attention import backends
from megakv.attention.prefill import ROUNDED_TOLERANCE, load_prefill
from megakv.attention.reference import dense_attention

# Against the reference on the same rounded inputs: 16-bit inputs are computed in float32, but for weights by pairs.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
HEADS = [(4, 4), (4, 2), (8, 1)]


def inputs(seed, heads, kv_heads, rows, keys, dim, value_dim, dtype):
    """Queries as the models give them, a transposed view; keys and values as slices of a larger buffer."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, dim, generator=generator, dtype=torch.float64).to(dtype).transpose(0, 1)
    k = torch.randn(kv_heads, keys + 9, dim, generator=generator, dtype=torch.float64).to(dtype)[:, 4 : 4 + keys]
    v = torch.randn(kv_heads, keys + 9, value_dim, generator=generator, dtype=torch.float64).to(dtype)[:, 4 : 4 + keys]
    return q, k, v


def assert_agrees(actual, expected, dtype, rounded=False):
    tolerance = TOLERANCE[dtype]
    bound = ROUNDED_TOLERANCE if rounded else tolerance
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=bound, atol=bound)
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("backend", [backends.cpu_flash, backends.math], ids=["flash", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_backend_agrees_with_reference(backend, dtype, dim, heads):
    for seed, (rows, keys) in enumerate([(1, 1), (1, 127), (2, 3), (5, 7), (127, 127), (3, 600), (130, 5)]):
        q, k, v = inputs(seed + dim, *heads, rows, keys, dim, dim, dtype)
        scale = dim**-0.5
        assert_agrees(backend(q, k, v, scale), dense_attention(q, k, v, scale), dtype)
        visible = torch.rand(rows, keys, generator=torch.Generator().manual_seed(seed)) < 0.3
        visible[0] = False
        masked = backend(q, k, v, scale, visible_LS=visible)
        assert_agrees(masked, dense_attention(q, k, v, scale, visible_LS=visible), dtype)
        assert torch.equal(masked[0][:, 0], torch.zeros_like(masked[0][:, 0]))
        assert masked[1][:, 0].eq(-torch.inf).all()
        if rows == keys:
            triangle = torch.ones(rows, rows, dtype=torch.bool).tril()
            expected = dense_attention(q, k, v, scale, visible_LS=triangle)
            assert_agrees(backend(q, k, v, scale, causal=True), expected, dtype)


@pytest.mark.parametrize("backend", [backends.cpu_flash, backends.math], ids=["flash", "math"])
def test_masked_prefix_longer_than_a_kernel_tile(backend):
    q, k, v = inputs(3, 4, 2, 300, 1500, 16, 16, torch.float32)
    visible = torch.zeros(300, 1500, dtype=torch.bool)
    visible[5:200, 1400:] = True
    visible[100:, :2] = True
    assert_agrees(
        backend(q, k, v, 0.25, visible_LS=visible), dense_attention(q, k, v, 0.25, visible_LS=visible), torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dims", [(24, 16), (192, 128), (16, 24)], ids=str)
def test_value_dim_may_differ(dtype, dims):
    prefill, _ = load_prefill()
    rounded = prefill is not None and prefill.rounds(dtype)
    for rows, keys in [(1, 50), (3, 7), (65, 65)]:
        q, k, v = inputs(rows, 4, 4, rows, keys, *dims, dtype)
        actual = backends.attend_block(q, k, v, 0.1, causal=rows == keys)
        triangle = torch.ones(rows, keys, dtype=torch.bool).tril() if rows == keys else None
        assert actual[0].shape == (4, rows, dims[1])
        assert_agrees(actual, dense_attention(q, k, v, 0.1, visible_LS=triangle), dtype, rounded)


@pytest.mark.parametrize("heads", [*HEADS, (71, 1)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17])
def test_decode_rows_packed_by_group(heads, rows):
    q, k, v = inputs(rows, *heads, rows, 777, 64, 64, torch.float32)
    assert_agrees(backends.attend_block(q, k, v, 0.125), dense_attention(q, k, v, 0.125), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_16_bit_keys_are_widened(dtype, rows):
    q, k, v = inputs(rows, 4, 2, rows, 577, 16, 24, dtype)
    actual = backends.cpu_flash(q, k, v, 0.25)
    assert actual[0].dtype == torch.float32
    assert_agrees(actual, dense_attention(q, k, v, 0.25), dtype)


def test_last_dim_stride_other_than_one():
    q, k, v = inputs(0, 4, 2, 9, 33, 16, 16, torch.float32)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert_agrees(backends.attend_block(*strided, 0.25), dense_attention(q, k, v, 0.25), torch.float32)


@pytest.mark.parametrize("budget", [1 << 10, 8 << 20])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_alibi", [False, True])
def test_math_tiles_softcap_and_alibi(monkeypatch, budget, softcap, with_alibi):
    monkeypatch.setattr(backends, "MATH_SCORES", budget)
    monkeypatch.setattr(backends, "MATH_KEYS", 37)
    for causal, rows, keys in [(False, 5, 100), (True, 127, 127), (False, 90, 3)]:
        q, k, v = inputs(rows, 6, 3, rows, keys, 16, 16, torch.float32)
        bias = alibi = None
        if with_alibi:
            slopes = torch.tensor([2.0**-h for h in range(1, 7)])
            q_slots, positions = torch.arange(rows) + 70_000, torch.arange(keys) + 70_000
            alibi = backends.Alibi(slopes, q_slots, positions)
            bias = slopes[:, None, None] * (positions - q_slots[:, None])
        triangle = torch.ones(rows, keys, dtype=torch.bool).tril() if causal else None
        expected = dense_attention(q, k, v, 0.5, visible_LS=triangle, softcap=softcap, bias_HLS=bias)
        actual = backends.attend_block(q, k, v, 0.5, causal=causal, softcap=softcap, alibi=alibi)
        # Of scores up to 50 with a scale of 0.5, float32 keeps 4e-6.
        torch.testing.assert_close(actual[0].double(), expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(actual[1].double(), expected[1], rtol=1e-6, atol=1e-5)


def test_selection_by_dtype_and_device():
    q = torch.zeros(2, 1, 8)
    assert backends.select(q, 8, masked=False) is backends.cpu_flash
    assert backends.select(q.bfloat16(), 8, masked=True) is backends.cpu_flash
    assert backends.select(q.double(), 8, masked=False) is backends.math
    assert backends.select(q.to("meta"), 8, masked=False) is backends.math


def test_a_kernel_that_disagrees_is_left_out(caplog):
    def wrong(q, k, v, scale, *, causal=False, visible_LS=None):
        out, lse = backends.math(q, k, v, scale, causal=causal, visible_LS=visible_LS)
        return out, lse / 0.6931

    def broken(q, k, v, scale, *, causal=False, visible_LS=None):
        raise RuntimeError("no kernel image")

    device = torch.device("cpu")
    assert backends._agrees(backends.cpu_flash, device, torch.float32, 16, 24)
    assert not backends._agrees(wrong, device, torch.float32, 16, 16)
    assert "log-sum-exp differs" in caplog.text
    assert not backends._agrees(broken, device, torch.float32, 16, 16)
    assert "no kernel image" in caplog.text
