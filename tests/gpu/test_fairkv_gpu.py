"""Ragged heads on CUDA: attention against the dense float64 reference, and time that goes with what was kept."""

import numpy as np
import pytest
import torch

from megakv.attention.partial import PartialAttention, Scoring
from megakv.attention.reference import dense_attention
from megakv.cache.ragged_attention import RaggedPart
from megakv.cache.ragged_body import RaggedBody
from megakv.fairkv.selection import thresholds

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "rows"), [(8, 1, 1), (4, 4, 1), (2, 8, 2), (4, 4, 40)])
def test_ragged_attention_on_cuda(dtype, kv_heads, group, rows):
    length, dim = 3000, 128
    q = torch.randn(kv_heads * group, rows, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(kv_heads, length, dim, device="cuda", dtype=dtype) for _ in range(2))
    mask = torch.rand(kv_heads, length, device="cuda") < torch.rand(kv_heads, 1, device="cuda") ** 2
    mask[0] = True
    mask[1] = False
    body = RaggedBody.kept(k, v, mask, np.arange(length))
    assert body is not None
    scale = dim**-0.5
    partial = PartialAttention(q, np.arange(length, length + rows), Scoring(scale))
    RaggedPart(0, body, np.arange(length), np.arange(length)).add_to(partial)
    for head in range(kv_heads):
        own = slice(head * group, (head + 1) * group)
        visible = mask[head][None].expand(rows, -1)
        out, lse = dense_attention(q[own], k[head : head + 1], v[head : head + 1], scale, visible_LS=visible)
        torch.testing.assert_close(partial.out[own].double(), out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        if head != 1:
            torch.testing.assert_close(partial.lse[own].double(), lse, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_thresholds_on_cuda_are_those_of_the_cpu():
    keys = torch.randint(0, 1 << 62, (5000,))
    groups = torch.randint(0, 7, (5000,))
    wanted = torch.tensor([0, 1, 10, 300, 5000, 77, 400])
    expected = thresholds(keys, groups, wanted, lambda counts: counts)
    found = thresholds(keys.cuda(), groups.cuda(), wanted.cuda(), lambda counts: counts)
    assert torch.equal(found.cpu(), expected)
