"""Decoding over ragged heads, by hand."""

import random

import pytest
import torch

from benchmarks.harness.ragged_times import RaggedTimes
from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import SumTimes
from megakv.costmodel.shape import LayerShape, ModelShape
from tests.unit.costmodel.profiles import ideal

PAIR_S, BATCH, RANKS, DENSE, VOCAB = 1e-7, 3, 4, 400_000, 5000
MODEL = ModelShape(64, 128, VOCAB, 8, 4, 64, 64, (LayerShape(DENSE),) * 2, 0, torch.float32)
MATMUL = Curve(sizes=(1, 101), seconds=(1e-9, 101e-9))


def test_the_fullest_rank_of_every_layer_counts() -> None:
    lag = random.uniform(0, 1)
    sums = SumTimes(ranks=RANKS, shared_memory=True, seconds=Curve.affine(1e-3, 1e9), wait_s=1e-3)
    profile = ideal(seconds_per_pair=PAIR_S, matmul=MATMUL, sums=(sums,), lag=lag)
    loads = [[random.randint(1000, 9000) for _ in range(RANKS)] for _ in MODEL.layers]
    times = RaggedTimes(profile, MODEL.attention(), batch=BATCH, ranks=RANKS, shared_memory=True)
    # Each kept token meets the two query heads of its KV head.
    attention = sum(map(max, loads)) * 2 * PAIR_S
    outputs = 2 * (2e-3 + BATCH * 8 * 64 * 4 / 1e9)
    assert times.attention(loads, [False, False]) == pytest.approx(attention + outputs, rel=1e-2)
    shared = times.attention(loads, [True, False]) - times.attention(loads, [False, False])
    assert shared == pytest.approx(2e-3 + RANKS * BATCH * 8 * 4 / 1e9)
    dense = (1 + lag) * (2 * DENSE / RANKS + VOCAB * 64) * BATCH * 1e-9
    hidden = 4 * (2e-3 + BATCH * 64 * 4 / 1e9)
    assert times.step(MODEL, loads, [False, False]) == pytest.approx(attention + dense + hidden, rel=1e-2)
