"""Latents attended to in both ways are the attention of the heads that they stand for."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from megakv.attention.latent import EXPANDED_ROWS, LatentHeads, expanding_pays
from megakv.attention.partial import KVPart, PackedAttention, PartialAttention
from megakv.attention.reference import Scoring, dense_attention
from megakv.attention.together import attend_rows
from megakv.attention.tsp import RectangleAttention
from megakv.distributed.sharding import TokenBlock

N, P, V, R = 7, 4, 10, 20


def heads_of(number: int, dtype: torch.dtype = torch.float32) -> LatentHeads:
    return LatentHeads(torch.randn(number * (N + V), R).to(dtype) / R**0.5, number, N)


def rows_of(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(1, count, R + P).to(dtype), torch.empty(1, count, 0, dtype=dtype)


def expected(latent: LatentHeads, q: Tensor, rows: Tensor, scale: float, visible: Tensor) -> tuple[Tensor, Tensor]:
    """By each head's own keys and values, in float64."""
    weight = latent.weight.double().view(latent.heads, N + V, R)
    expanded = torch.einsum("sr,hdr->hsd", rows[0, :, :R].double(), weight)
    rotated = rows[:, :, R:].double().expand(latent.heads, -1, -1)
    return dense_attention(q, torch.cat((expanded[..., :N], rotated), -1), expanded[..., N:], scale, visible_LS=visible)


@pytest.mark.parametrize("kind", [PartialAttention, RectangleAttention])
@pytest.mark.parametrize("expands", [False, True])
def test_both_ways_are_the_attention_of_all_heads(expands: bool, kind: type[PartialAttention]) -> None:
    heads, count = random.randint(1, 5), random.choice((1, 33, EXPANDED_ROWS + 5))
    latent, (rows, nothing) = heads_of(heads), rows_of(count)
    slots = np.sort(np.random.default_rng(random.randint(0, 99)).permutation(count)[: random.randint(1, 40)])
    q = torch.randn(heads, len(slots), N + P)
    scoring = Scoring(0.3, latent=latent)
    if expands:
        attention = kind(q, slots, scoring, V)
    else:
        attention = kind(latent.absorb(q), slots, scoring.absorbed(), R)
    cut = random.randint(0, count)
    for part in (slice(cut, count), slice(0, cut)):
        attention.add(rows[:, part], nothing[:, part], np.arange(part.start, part.stop))
    visible = torch.arange(count)[None] <= torch.from_numpy(slots)[:, None]
    out, lse = expected(latent, q, rows, 0.3, visible)
    found = attention.out if expands else latent.lift(attention.out)
    assert torch.allclose(found.double(), out, atol=1e-4) and torch.allclose(attention.lse.double(), lse, atol=1e-4)


def test_the_compiled_kernel_reads_values_from_the_keys() -> None:
    latent = heads_of(6)
    scoring = Scoring(0.2, latent=latent)
    q, lengths = torch.randn(6, 3, N + P), [40, 1, 77]
    tokens = TokenBlock(np.arange(3), np.array(lengths), np.array(lengths), 3)
    parts = []
    for sequence, count in enumerate(lengths):
        rows, nothing = rows_of(count)
        parts.append(KVPart(sequence, rows, nothing, np.arange(count), np.arange(count)))
    found = attend_rows(latent.absorb(q), tokens, scoring.absorbed(), 1, R, parts)
    attention = PackedAttention(q, tokens, scoring, V)
    for part in parts:
        attention.add(part)
    out, lse = attention.result()
    assert torch.allclose(latent.lift(found[0]), out, atol=1e-4) and torch.allclose(found[1], lse, atol=1e-4)


def test_expanding_pays_where_many_queries_see_the_same_rows() -> None:
    deepseek = partial(expanding_pays, 512, 128, 128)
    assert not deepseek([1], [100_000], 1) and not deepseek([1] * 64, [100] * 64, 1)
    assert deepseek([8192], [0], 1) and deepseek([8192], [0], 8)
    # R (N + V) / (2 R - N - V) queries of a long context.
    assert [deepseek([count], [1_000_000], 1) for count in (168, 175)] == [False, True]
    # Every rank would expand all rows, for its part of the queries.
    assert not deepseek([175], [1_000_000], 2) and deepseek([2 * 175], [1_000_000], 2)
    assert not expanding_pays(16, 20, 20, [8192], [0], 4), "latents smaller than half of a head's keys and values"


def test_types_stay_what_they_are() -> None:
    latent = heads_of(2, torch.bfloat16)
    assert latent.absorb(torch.randn(2, 3, N + P).bfloat16()).dtype == torch.bfloat16
    assert latent.lift(torch.randn(2, 3, R)).dtype == torch.float32
    scoring = Scoring(1.0, latent=latent)
    assert not scoring.plain and scoring.absorbed().plain
