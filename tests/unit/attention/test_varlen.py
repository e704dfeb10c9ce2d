"""Many runs of keys in one variable-length call, by CUDA's kernels as plain loops with their signatures."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megakv.attention import varlen
from megakv.attention.reference import dense_attention
from megakv.attention.varlen import CHUNK_KEYS, KeyRuns, efficient, flash, select_varlen

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check_bounds(bounds: Tensor, total: int, longest: int) -> None:
    assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == total and bounds.diff().max() == longest


def loop(q_THD: Tensor, k_nHD: Tensor, v_nHD: Tensor, bounds_q: Tensor, bounds_k: Tensor, scale: float) -> Any:
    """Outputs ``[T, H, Dv]`` and log-sum-exps, a list of ``[H, R]``, of sequences that bounds cut."""
    outs, lses = [], []
    for (a, b), (c, d) in zip(pairwise(bounds_q.tolist()), pairwise(bounds_k.tolist()), strict=True):
        out, lse = dense_attention(*(part.transpose(0, 1) for part in (q_THD[a:b], k_nHD[c:d], v_nHD[c:d])), scale)
        outs.append(out.transpose(0, 1))
        lses.append(lse.float())
    return torch.cat(outs).to(q_THD.dtype), lses


def loop_flash(q, k, v, bounds_q, bounds_k, max_q, max_k, dropout, causal, debug, *, scale, **options: Any) -> Any:
    """``aten::_flash_attention_forward`` without causality."""
    assert not (dropout or causal or debug or any(value is not None for value in options.values()))
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16) and q.shape[2] == v.shape[2]
    check_bounds(bounds_q, len(q), max_q)
    check_bounds(bounds_k, len(k), max_k)
    out, lses = loop(q, k, v, bounds_q, bounds_k, scale)
    lse = torch.cat(lses, dim=1)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), *(torch.empty(0) for _ in range(3))


def loop_efficient(
    q, k, v, bias, bounds_q, bounds_k, max_q, max_k, dropout, mask, with_lse=False, *, scale, **options: Any
) -> Any:
    """``aten::_efficient_attention_forward`` without a mask."""
    assert bias is None and with_lse and not (dropout or mask or any(value is not None for value in options.values()))
    check_bounds(bounds_q, q.shape[1], max_q)
    check_bounds(bounds_k, k.shape[1], max_k)
    out, lses = loop(q[0], k[0], v[0], bounds_q, bounds_k, scale)
    padded = torch.full((len(lses), q.shape[2], -(-max_q // 32) * 32), torch.nan)
    padded[..., :max_q] = torch.stack(lses)
    return out[None], padded, torch.empty(0), torch.empty(0), max_q, max_k


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", loop_flash, "CPU")
        library.impl("_efficient_attention_forward", loop_efficient, "CPU")
        yield


CASES = [
    (flash, torch.float16, 24),
    (flash, torch.bfloat16, 24),
    (efficient, torch.float32, 24),
    (efficient, torch.float32, 8),
]


@pytest.mark.parametrize(("kernel", "dtype", "value_dim"), CASES)
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("counts", [[1, 7, 2], [0, 3, 0], [CHUNK_KEYS, CHUNK_KEYS + 1, 0, 2], None])
def test_every_run_is_attended_to_by_its_own_queries(kernel, dtype, value_dim, rows, counts) -> None:
    drawn = [random.choice((0, 1, random.randint(2, 2500))) for _ in range(6)]
    own = np.array(counts or [*drawn, random.randint(1, 9)])
    total = int(own.sum())
    q = torch.randn(len(own), rows, 24).to(dtype)
    k, v = torch.randn(total, 24).to(dtype), torch.randn(total, value_dim).to(dtype)
    found = kernel(q, k, v, KeyRuns(own, CPU), 0.3)
    assert found[0].dtype == found[1].dtype == torch.float32
    parts = (each[None].split(own.tolist(), dim=1) for each in (k, v))
    for run, (keys, values) in enumerate(zip(*parts, strict=True)):
        expected = dense_attention(q[run : run + 1], keys, values, 0.3)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[run].double(), other[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_chunks_are_few_and_equal() -> None:
    counts = np.random.randint(0, 5 * CHUNK_KEYS, 40) * (np.random.rand(40) < 0.7)
    owners, chunks = KeyRuns(counts, CPU).chunks
    assert chunks.longest <= CHUNK_KEYS and chunks.counts.min() > 0 and (owners.diff() >= 0).all()
    for run, count in enumerate(counts.tolist()):
        own = chunks.counts[owners.numpy() == run]
        assert own.sum() == count and len(own) == -(-count // CHUNK_KEYS)
        assert not len(own) or own.max() - own.min() <= 1


@pytest.mark.parametrize(("kernel", "dtype", "value_dim"), CASES)
def test_kernels_are_checked_before_they_are_used(kernel, dtype, value_dim) -> None:
    def wrong(*given: Any) -> tuple[Tensor, Tensor]:
        out, lse = kernel(*given)
        return out, lse + 0.2

    assert varlen._agrees(kernel, CPU, dtype, 24, value_dim)
    assert not varlen._agrees(wrong, CPU, dtype, 24, value_dim)


def test_no_kernel_off_cuda() -> None:
    q, k = torch.randn(2, 1, 16), torch.randn(5, 16)
    assert select_varlen(q, k, k) is None
