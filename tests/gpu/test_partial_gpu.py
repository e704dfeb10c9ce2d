"""Partial attention on CUDA against the dense float64 reference."""

import logging

import numpy as np
import pytest
import torch

from megakv.attention import backends
from megakv.attention.partial import PartialAttention, Scoring
from tests.reference import reference_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("large", [False, True])
def test_parts_on_cuda(dtype, dims, kv_heads, window, large, caplog, monkeypatch):
    if large:
        # Kernels that only pay for large blocks.
        monkeypatch.setattr(backends, "CUDNN_OPERATIONS", 0.0)
    generator = torch.Generator("cuda").manual_seed(kv_heads)
    rng = np.random.default_rng(kv_heads)
    length = 1000

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    q = normal(length, 8, dims[0]).transpose(0, 1)
    k, v = normal(kv_heads, length, dims[0]), normal(kv_heads, length, dims[1])
    chunks = np.array_split(np.arange(length), 4)
    shards = [np.concatenate([chunks[0], chunks[3]]), np.concatenate([chunks[1], chunks[2]])]
    scoring = Scoring(dims[0] ** -0.5, window=window)
    expected = reference_attention(q, k, v, np.arange(length), np.arange(length), scoring)
    for own in [*shards, np.arange(1, length, 3), np.array([length - 1])]:
        partial = PartialAttention(q[:, own], own, scoring)
        for part in rng.permutation(2):
            partial.add(k[:, shards[part]], v[:, shards[part]], shards[part])
        for actual, want in zip((partial.out, partial.lse), expected, strict=True):
            torch.testing.assert_close(actual.double(), want[:, own], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], "a kernel was replaced by matrix products"


def test_half_precision_uses_flash_attention():
    q = torch.zeros(4, 8, 128, dtype=torch.bfloat16, device="cuda")
    assert backends.select(q, 128, masked=False) is backends.cuda_flash
    assert backends.select(q, 128, masked=True) is backends.cuda_efficient
    assert backends.select(q.float(), 128, masked=False) is backends.cuda_efficient
