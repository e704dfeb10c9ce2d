"""Plain transformers and DeepSpeed's tensor parallelism, by hand."""

import random

import pytest
import torch

from benchmarks.harness.plain import PlainTimes
from megakv.costmodel.curves import Curve
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import SumTimes
from megakv.costmodel.shape import LayerShape, ModelShape
from tests.unit.costmodel.profiles import ideal

LAYERS, HEADS, DENSE, VOCAB = 3, 8, 400_000, 5000
MODEL = ModelShape(64, 128, VOCAB, HEADS, HEADS, 64, 64, (LayerShape(DENSE),) * LAYERS, 0, torch.float32)
PAIR_S = 1e-9
MATMUL = Curve(sizes=(1, 101), seconds=(1e-9, 101e-9))


def test_a_whole_prompt_in_every_layer() -> None:
    new = random.randint(300, 3000)
    plain = PlainTimes(ideal(seconds_per_pair=PAIR_S, matmul=MATMUL), MODEL)
    dense = LAYERS * DENSE * new * 1e-9 + VOCAB * 64 * 1e-9
    square = LAYERS * HEADS * PAIR_S * new * new
    assert plain.prefill(new) == pytest.approx(dense + square / 2, rel=1e-3)
    assert plain.prefill(new, masked=True) == pytest.approx(dense + square, rel=1e-3)


def test_a_cache_that_grows_is_copied() -> None:
    context, batch = random.randint(100, 900), random.randint(1, 5)
    copy = Curve(sizes=(1.0, 1e9), seconds=(1e-9, 1.0))
    attention = LAYERS * batch * HEADS * PAIR_S * (context + 0.5)
    assert PlainTimes(ideal(seconds_per_pair=PAIR_S), MODEL).decode(context, batch) == pytest.approx(
        attention, rel=1e-2
    )
    # Of two sizes that glibc never keeps, one was reused all the same when it was measured.
    fresh = Curve(sizes=(1.0, 5e7, 1e8), seconds=(1e-9, 5e-2, 1e-1 + 4e-2))
    plain = PlainTimes(ideal(seconds_per_pair=PAIR_S, copy_bytes=copy, copy_fresh=fresh), MODEL)
    for many, page in ((1, 0.0), (100_000, 4e-10)):
        copied = LAYERS * 2 * batch * (many * context + 1) * HEADS * 64 * 4 * (1e-9 + page)
        grown = plain.decode(many * context, batch, copied=True) - plain.decode(many * context, batch)
        assert grown == pytest.approx(copied)


def test_tensor_parallel_ranks_wait_for_each_other() -> None:
    """Two sums a layer and one of the logits, each as measured, by the way that is used."""
    slow = SumTimes(ranks=4, seconds=Curve.affine(1e-3, 1e9), wait_s=2e-3)
    fast = SumTimes(ranks=4, shared_memory=True, seconds=Curve.affine(1e-5, 1e10))
    lag = random.uniform(0.1, 1)
    profile = ideal(matmul=MATMUL, sums=(slow, fast), lag=lag)
    new = random.randint(300, 3000)
    nbytes = 2 * LAYERS * new * 64 * 4 + VOCAB * 4
    gloo, shared = PlainTimes(profile, MODEL, tp_size=4), PlainTimes(profile, MODEL, tp_size=4, shared_memory=True)
    count = 2 * LAYERS + 1
    between = count * (3e-3 - 1e-5) + nbytes * (1e-9 - 1e-10)
    assert gloo.prefill(new) - shared.prefill(new) == pytest.approx(between, rel=1e-3)
    # The last rank is late by a part of reading the weights, which all tokens of a prompt share.
    read = (LAYERS * DENSE + VOCAB * 64) / 4 * 1e-9
    prompt = gloo.prefill(new) - PlainTimes(profile.model_copy(update={"lag": 0.0}), MODEL, tp_size=4).prefill(new)
    assert prompt == pytest.approx(lag * read, rel=1e-2)
    # The other ranks of a decoding step are late by a part of what was computed.
    step = read * (1 + lag)
    sums = 2 * LAYERS * slow.seconds.at(64 * 4) + slow.seconds.at(VOCAB * 4) + count * slow.wait_s
    assert gloo.decode(500) == pytest.approx(step + sums, rel=1e-2, abs=2e-5)
    # Sums of numbers of ranks that were not measured are worked out.
    other = TokenTimes(profile, MODEL, tp_size=2)
    assert other.sums(0, new) == TokenTimes(ideal(matmul=MATMUL), MODEL, tp_size=2).sums(0, new)
