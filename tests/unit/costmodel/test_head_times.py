"""A decoding step over mapped heads, by hand."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.curves import Curve, RaggedTable
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import CallTimes, HardwareProfile, SumTimes
from megakv.costmodel.head_times import HeadTimes, RankWork, rank_works, shared_entries
from megakv.costmodel.kernels import ragged_call
from megakv.costmodel.shape import AttentionShape, LayerShape, ModelShape
from tests.unit.costmodel.profiles import ideal

HEADS, DIM, HIDDEN, VOCAB, DENSE, LAYERS = 4, 64, 64, 5000, 400_000, 3
MODEL = ModelShape(HIDDEN, 128, VOCAB, 8, HEADS, DIM, DIM, (LayerShape(DENSE),) * LAYERS, 0, torch.float32)
MATMUL = Curve(sizes=(1, 101), seconds=(1e-9, 101e-9))
HEAD_WEIGHTS = HIDDEN * DIM * (2 + 2 + 1 + 1)
"""Queries of two heads and what they give, a key and a value."""


@dataclass(frozen=True)
class Placed:
    ranks: list[list[int]]
    shares: list[list[float]]


def whole(*ranks: int) -> Placed:
    """Every head on one rank."""
    return Placed([[rank] for rank in ranks], [[1.0] for _ in ranks])


def table(call_s: float, head_s: float, token_s: float, jitter: float = 0.0, dim: int = DIM) -> RaggedTable:
    heads, tokens = (1, 5), (3, 50, 700)
    seconds = [[call_s + h * head_s + h * t * token_s for t in tokens] for h in heads]
    return RaggedTable(head_dim=dim, group=2, heads=heads, tokens=tokens, seconds=seconds, jitter=jitter)


def machine(**changes: object) -> HardwareProfile:
    sums = SumTimes(ranks=2, shared_memory=True, seconds=Curve.affine(1e-3, 1e9), wait_s=1e-3)
    return ideal(matmul=MATMUL, sums=(sums,), **changes)


def test_a_layer_by_hand() -> None:
    """Copies cost weights and a call on every rank that holds them, tokens are shared, and the last rank counts."""
    call_s, head_s, token_s = (random.uniform(0.5, 1) * size for size in (1e-3, 1e-4, 1e-6))
    lag, launch, batch = random.uniform(0, 1), random.uniform(1e-4, 1e-3), 3
    profile = machine(ragged=(table(call_s, head_s, token_s),), lag=lag, issue_s=launch, share_s=1e-2)
    times = HeadTimes(profile, MODEL, tp_size=2, batch=batch, shared_memory=True)
    kept = [random.randint(100, 5000) for _ in range(HEADS)]
    placed = Placed([[0], [0, 1], [1], [1]], [[1.0], [0.3, 0.7], [1.0], [1.0]])
    loads = kept[0] + 0.3 * kept[1], 0.7 * kept[1] + kept[2] + kept[3]
    ranks = [
        held * ((1 + lag) * HEAD_WEIGHTS * batch * 1e-9 + batch * head_s) + batch * load * token_s
        for held, load in zip((2, 3), loads, strict=True)
    ]
    feed_forward = (DENSE - HEADS * HEAD_WEIGHTS) / 2 * batch * 1e-9
    alike = (1 + lag) * (feed_forward + launch) + call_s + 2 * (2e-3 + batch * HIDDEN * 4 / 1e9)
    told = 2e-3 + 2 * 2 * batch * 4 / 1e9
    assert shared_entries(placed) == 2
    assert times.layer_seconds(1, placed, kept) == pytest.approx(alike + max(ranks) + told, rel=1e-6)
    plain = whole(0, 0, 1, 1)
    alone = [RankWork(2, kept[0] + kept[1]), RankWork(2, kept[2] + kept[3])]
    assert rank_works(plain, kept, 2) == alone
    assert times.attention(alone) == pytest.approx(
        call_s + batch * (2 * head_s + max(work.tokens for work in alone) * token_s)
    )
    layers = [placed, plain, plain]
    step = sum(times.layer_seconds(index, each, kept) for index, each in enumerate(layers))
    # The output head is whole on every rank, and its result is told to all.
    head = (1 + lag) * VOCAB * HIDDEN * batch * 1e-9
    assert times.step_seconds(layers, [kept] * 3) == pytest.approx(step + head + 1e-2, rel=1e-6)


def test_equal_heads_on_one_rank_are_the_predicted_step_of_dense_ones() -> None:
    """One predictor: what `ttit_seconds` says of dense caches, where heads keep all and lie on one rank."""
    known = {name: random.uniform(1e-3, 1e-2) for name in ("issue_s", "pass_s", "step_s")}
    profile = ideal(matmul=MATMUL, lag=0.7, added=CallTimes(layer_s=1e-3), **known)
    tokens, batch = random.randint(500, 9000), random.randint(1, 5)
    expected = ttit_seconds(profile, MODEL, Workload((1,) * batch, (tokens - 1,) * batch, 1), "pass_q")
    found = HeadTimes(profile, MODEL, tp_size=1, batch=batch)
    assert found.step_seconds([whole(0, 0, 0, 0)] * LAYERS, [[tokens] * HEADS] * LAYERS) == pytest.approx(
        expected, rel=1e-3
    )


def test_heads_in_runs_have_the_weights_of_plain_tensor_parallelism() -> None:
    profile = machine(copy_bytes=Curve.affine(1e-5, 1e9))
    kept = [0.0] * HEADS
    times = HeadTimes(profile, MODEL, tp_size=2, batch=7)
    dense = TokenTimes(profile, MODEL, tp_size=2).layer(0, 7)
    call_s = ragged_call(profile, MODEL.attention()).call_s
    assert times.layer_seconds(0, whole(0, 0, 1, 1), kept) == pytest.approx(dense + call_s, rel=1e-9)


def test_the_last_of_equal_ranks_is_late_and_a_slow_one_alone_is_not() -> None:
    late = machine(ragged=(table(0.0, 0.0, 1e-6, jitter=0.1),))
    times = HeadTimes(late, MODEL, tp_size=2)
    equal, slow = ([RankWork(2, tokens) for tokens in pair] for pair in ((1000, 1000), (1800, 200)))
    assert times.attention(equal) == pytest.approx(1.1e-3)
    assert times.attention(slow) == pytest.approx(1.8e-3)
    assert HeadTimes(late, MODEL, tp_size=1).attention(equal[:1]) == pytest.approx(1e-3)


def test_no_layer_is_faster_than_its_launches() -> None:
    times = HeadTimes(machine(launch_s=5.0), MODEL, tp_size=2)
    assert times.layer_seconds(0, whole(0, 0, 1, 1), [1e3] * HEADS) == 5.0


def test_a_table_of_calls() -> None:
    """The plane through the points, that of the closest head dimension; without one, the dense kernel."""
    parts = [random.uniform(0.5, 1) * size for size in (1e-4, 1e-5, 1e-7)]
    shape = AttentionShape(8, 4, DIM, DIM, 4)
    profile = machine(ragged=(table(*parts), table(1.0, 1.0, 1.0, dim=4 * DIM)))
    assert ragged_call(profile, shape)[:3] == pytest.approx(parts)
    heads, tokens = random.randint(1, 9), random.randint(1, 9000)
    assert ragged_call(profile, shape).seconds(heads, tokens) == pytest.approx(np.dot(parts, (1, heads, tokens)))
    # Two query heads meet each token; equal ranks straggle.
    dense = ragged_call(ideal(seconds_per_pair=1e-7, straggle=0.2), shape)
    assert (dense.head_s, dense.jitter) == (0, 0.2) and dense.token_s == pytest.approx(2e-7)
    # Noise alone cannot make a part negative.
    odd = table(*parts).model_copy(update={"seconds": ((3.0, 2.0, 1.0),) * 2})
    assert min(odd.call[:3]) == 0


def test_what_is_refused() -> None:
    times = HeadTimes(machine(), MODEL, tp_size=2)
    with pytest.raises(ValueError, match="budgets of 1 layers with 4 KV heads: the model has 3 with 4"):
        times.step_seconds([whole(0, 0, 1, 1)], [[1.0] * HEADS])
    with pytest.raises(ValueError, match="batch = 0, tp_size = 2: allowed: 1 or more of each"):
        HeadTimes(machine(), MODEL, tp_size=2, batch=0)
    with pytest.raises(ValueError, match="caches latents, one head for all ranks"):
        HeadTimes(machine(), replace(MODEL, row_dim=40, latent=32), tp_size=2)
    with pytest.raises(ValueError, match="seconds must have 2 rows of 2 to 3 times"):
        RaggedTable(head_dim=8, group=1, heads=(1, 2), tokens=(1, 2, 3), seconds=((1.0, 2.0),))
