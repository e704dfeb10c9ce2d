"""Merging by log-sum-exp against the attention over all keys."""

import math

import pytest
import torch

from megakv.attention.merge import merge_, merge_parts
from megakv.attention.reference import dense_attention


def parts_of(seed, count, *, gap=0.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(4, n, 8, generator=generator, dtype=torch.float64) for n in (5, 7 * count, 7 * count))
    k[:, :7] += gap * q.mean(1, keepdim=True) / q.mean(1, keepdim=True).square().sum(-1, keepdim=True)
    parts = [dense_attention(q, k[:, i : i + 7], v[:, i : i + 7], 1.0) for i in range(0, 7 * count, 7)]
    return dense_attention(q, k, v, 1.0), [(out.to(dtype), lse.to(dtype)) for out, lse in parts]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_gives_the_whole(seed, count):
    (out, lse), parts = parts_of(seed, count, dtype=torch.float32)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    merged_out, merged_lse = (x.clone() for x in parts[order[0]])
    for index in order[1:]:
        merge_(merged_out, merged_lse, *parts[index])
    torch.testing.assert_close(merged_out.double(), out, rtol=0, atol=2e-6)
    torch.testing.assert_close(merged_lse.double(), lse, rtol=0, atol=4e-6)
    stacked = merge_parts(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    torch.testing.assert_close(stacked[0].double(), out, rtol=0, atol=2e-6)
    torch.testing.assert_close(stacked[1].double(), lse, rtol=0, atol=4e-6)


@pytest.mark.parametrize("gap", [89.0, 1000.0, 1e4])
@pytest.mark.parametrize("first", [True, False])
def test_large_gaps_are_exact(gap, first):
    out, lse = torch.randn(2, 3, 5), torch.randn(2, 3)
    small_out, small_lse = torch.randn(2, 3, 5), lse - gap
    a, b = ((out, lse), (small_out, small_lse)) if first else ((small_out, small_lse), (out, lse))
    merged = a[0].clone(), a[1].clone()
    merge_(*merged, *b)
    assert torch.equal(merged[1], lse)
    torch.testing.assert_close(merged[0], out, rtol=0, atol=math.exp(-80))
    stacked = merge_parts(torch.stack([a[0], b[0]]), torch.stack([a[1], b[1]]))
    assert torch.equal(stacked[1], lse)
    torch.testing.assert_close(stacked[0], out, rtol=0, atol=math.exp(-80))


@pytest.mark.parametrize("gap", [89.0, 1e4])
def test_large_gaps_of_real_scores(gap):
    (out, lse), parts = parts_of(5, 3, gap=gap)
    stacked = merge_parts(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    torch.testing.assert_close(stacked[0], out, rtol=0, atol=1e-15 * gap + 1e-12)
    torch.testing.assert_close(stacked[1], lse, rtol=1e-14, atol=1e-12)


def test_empty_parts_are_neutral():
    out, lse = torch.randn(2, 3, 5), torch.randn(2, 3)
    nothing = torch.zeros(2, 3, 5), torch.full((2, 3), -torch.inf)
    merged = out.clone(), lse.clone()
    merge_(*merged, *nothing)
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    merged = nothing[0].clone(), nothing[1].clone()
    merge_(*merged, out, lse)
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    merged = nothing[0].clone(), nothing[1].clone()
    merge_(*merged, *nothing)
    assert torch.equal(merged[0], nothing[0]) and torch.equal(merged[1], nothing[1])
    stacked = merge_parts(torch.stack([nothing[0], out, nothing[0]]), torch.stack([nothing[1], lse, nothing[1]]))
    assert torch.equal(stacked[0], out) and torch.equal(stacked[1], lse)
    stacked = merge_parts(torch.stack([nothing[0]] * 2), torch.stack([nothing[1]] * 2))
    assert torch.equal(stacked[0], nothing[0]) and torch.equal(stacked[1], nothing[1])


def test_merge_works_on_views_and_lower_precision_parts():
    out, lse = torch.randn(7, 2, 5).transpose(0, 1), torch.randn(7, 2).t()
    part_out, part_lse = torch.randn(2, 3, 5).bfloat16(), torch.randn(2, 3)
    expected_out, expected_lse = merge_parts(
        torch.stack([out[:, 2:5], part_out.float()]), torch.stack([lse[:, 2:5], part_lse])
    )
    kept = out[:, 5:].clone()
    merge_(out[:, 2:5], lse[:, 2:5], part_out, part_lse)
    torch.testing.assert_close(out[:, 2:5], expected_out, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse[:, 2:5], expected_lse, rtol=0, atol=1e-6)
    assert torch.equal(out[:, 5:], kept)


def test_merge_parts_takes_empty_tensors():
    out, lse = merge_parts(torch.zeros(3, 2, 0, 5), torch.zeros(3, 2, 0))
    assert out.shape == (2, 0, 5) and lse.shape == (2, 0)
