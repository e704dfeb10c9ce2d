"""The compiled kernel for few query rows against the dense float64 reference, and machines that cannot have it."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megakv.attention import backends, compiled
from megakv.attention.reference import dense_attention
from megakv.base import kernel_build

TILE = 64
SOURCE = kernel_build.SOURCES / "decode.cpp"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def kernel():
    found, reason = compiled.load_kernel()
    if found is None:
        pytest.skip(f"no compiled kernel: {reason}")
    return found


def random_case(generator, *, keys):
    """Queries, keys and values of random shape; heads side by side within a token, or one behind the other."""

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    dtype, kv_heads, dim = pick(*DTYPES), pick(1, 2, 3, 8), pick(1, 3, 16, 20, 64, 80, 96, 128)
    group, length = pick((1, 1), (1, 16), (2, 1), (3, 2), (4, 1), (5, 3), (7, 2), (16, 1), (71, 1))
    value_dim = pick(dim, dim, 1, 7, 24, 128)
    q = torch.randn(length, kv_heads * group, dim, generator=generator).to(dtype).transpose(0, 1)
    if pick(True, False):
        rows = torch.randn(keys, kv_heads * (dim + value_dim), generator=generator).to(dtype)
        k = rows[:, : kv_heads * dim].unflatten(1, (kv_heads, dim)).transpose(0, 1)
        v = rows[:, kv_heads * dim :].unflatten(1, (kv_heads, value_dim)).transpose(0, 1)
    else:
        k = torch.randn(kv_heads, keys + 9, dim, generator=generator).to(dtype)[:, 4 : 4 + keys]
        v = torch.randn(kv_heads, keys, value_dim, generator=generator).to(dtype)
    return q, k, v


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("keys", [1, 2, 5, TILE - 1, TILE, TILE + 1, 3 * TILE, 1000, 20_000])
def test_it_agrees_with_the_reference(kernel, keys, threads):
    generator = torch.Generator().manual_seed(keys)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        for _ in range(3 if keys > 1000 else 12):
            q, k, v = random_case(generator, keys=keys)
            assert kernel.computes(q, k, v)
            scale = q.shape[2] ** -0.5
            out, lse = pool.submit(kernel, q, k, v, scale).result()
            expected = dense_attention(q, k, v, scale)
            assert out.dtype == lse.dtype == torch.float32
            torch.testing.assert_close(out.double(), expected[0], rtol=3e-6, atol=3e-6)
            torch.testing.assert_close(lse.double(), expected[1], rtol=3e-6, atol=3e-6)


def test_scores_far_apart(kernel):
    # Weights that underflow to 0, a maximum that comes last, and ones that are all alike.
    k = torch.zeros(1, 200, 16)
    k[0, :, 0] = torch.linspace(-300, 500, 200)
    v = torch.arange(200.0)[None, :, None].expand(1, 200, 16).contiguous()
    for query in (1.0, -1.0, 0.0):
        q = torch.full((1, 1, 16), query)
        out, lse = kernel(q, k, v, 1.0)
        expected = dense_attention(q, k, v, 1.0)
        torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
def test_scores_that_overflow_weigh_nothing(kernel, threads):
    # A tile, a chunk, all but the last key, and all of them.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        for keys, overflowing in ((200, TILE), (20_000, 9000), (300, 299), (200, 200)):
            q, k = torch.full((2, 1, 16), 1e20), torch.zeros(1, keys, 16)
            k[0, :overflowing] = -1e20
            v = torch.randn(1, keys, 8, generator=torch.Generator().manual_seed(keys))
            out, lse = pool.submit(kernel, q, k, v, 1.0).result()
            seen = v[0, overflowing:].double()
            expected = seen.mean(dim=0) if len(seen) else seen.sum(dim=0)
            torch.testing.assert_close(out.double(), expected.expand(2, 1, 8), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(lse, torch.tensor(float(len(seen))).log().expand(2, 1))


def test_what_is_not_a_number_is_not_hidden(kernel):
    q, k, v = torch.ones(1, 1, 16), torch.ones(1, 300, 16), torch.ones(1, 300, 16)
    k[0, 130, 3] = torch.nan
    out, lse = kernel(q, k, v, 1.0)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_what_it_does_not_compute(kernel):
    q, k = torch.ones(4, 2, 16), torch.ones(2, 9, 16)
    assert kernel.computes(q, k, k)
    assert not kernel.computes(torch.ones(4, 17, 16), k, k)
    assert kernel.computes(torch.ones(142, 1, 16), k, k)
    assert not kernel.computes(q.double(), k.double(), k.double())
    assert not kernel.computes(q, torch.ones(2, 16, 9).transpose(1, 2), k)
    assert not kernel.computes(q, k.half(), k.half()) and not kernel.computes(q, k, k.half())
    assert not kernel.computes(q, torch.ones(2, 9, 8), k)


def test_attention_goes_through_it(kernel, monkeypatch):
    monkeypatch.setattr(backends, "cpu_flash", None)
    q, k = torch.randn(4, 1, 16), torch.randn(2, 70, 16)
    out, expected = backends.attend_block(q, k, k, 0.3)[0], dense_attention(q, k, k, 0.3)[0]
    torch.testing.assert_close(out.double(), expected, rtol=3e-6, atol=3e-6)


def test_without_a_compiler_there_is_a_reason(tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such-compiler"):
        kernel_build.compiled(SOURCE, tmp_path, "no-such-compiler", kernel_build.FLAGS)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_what_does_not_compile_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="cannot compile .*decode.cpp: .*error"):
        kernel_build.compiled(SOURCE, tmp_path, "c++", (*kernel_build.FLAGS, "-fno-such-flag"))
    assert not list(tmp_path.iterdir())


def test_pytorch_s_kernels_do_where_there_is_none(tmp_path):
    script = (
        "import torch\n"
        "from megakv.attention.backends import attend_block\n"
        "from megakv.attention.compiled import load_kernel\n"
        "from megakv.attention.linear import load_linear\n"
        "from megakv.attention.prefill import load_prefill\n"
        "from megakv.injection.linears import rows_product\n"
        "for kernel, reason in (load_kernel(), load_prefill(), load_linear()):\n"
        "    assert kernel is None and 'no-such-compiler' in reason, reason\n"
        "print(rows_product(torch.ones(1, 8), torch.ones(3, 8)).sum().item())\n"
        "print(attend_block(torch.ones(2, 70, 8), torch.ones(1, 5, 8), torch.ones(1, 5, 8), 1.0)[0].sum().item())\n"
        "print(attend_block(torch.ones(2, 1, 8), torch.ones(1, 5, 8), torch.ones(1, 5, 8), 1.0)[0].sum().item())\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["24.0", "1120.0", "16.0"]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_together_and_in_pieces(kernel, dtype, threads):
    generator = torch.Generator().manual_seed(threads)
    for lengths in ([[7]], [[], [300]], [[1, 64, 5], [], [9000, 2000], [3]], [[130, 70]] * 5):
        kv_heads, group, dim, value_dim = 2, 3, 24, 40
        q = torch.randn(len(lengths), kv_heads * group, 2, dim, generator=generator).to(dtype)
        width = kv_heads * (dim + value_dim)
        pieces = [[torch.randn(n, width, generator=generator).to(dtype) for n in own] for own in lengths]
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            out, lse = pool.submit(kernel.rows(q, pieces, kv_heads, value_dim, 0.2)).result()
        for sequence, own in enumerate(pieces):
            if not own:
                assert out[sequence].eq(0).all()
                assert lse[sequence].eq(-torch.inf).all()
                continue
            rows = torch.cat(own)
            k = rows[:, : kv_heads * dim].unflatten(1, (kv_heads, dim)).transpose(0, 1)
            v = rows[:, kv_heads * dim :].unflatten(1, (kv_heads, value_dim)).transpose(0, 1)
            expected = dense_attention(q[sequence], k, v, 0.2)
            torch.testing.assert_close(out[sequence].double(), expected[0], rtol=3e-6, atol=3e-6)
            torch.testing.assert_close(lse[sequence].double(), expected[1], rtol=3e-6, atol=3e-6)
