"""A decoding step of ranks that meet in every layer, by hand."""

import random
from dataclasses import replace

import pytest
import torch

from megakv.costmodel.attention_time import DECODING, LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.curves import Curve
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.hardware import CallTimes
from megakv.costmodel.shape import LayerShape, ModelShape
from tests.unit.costmodel.profiles import ideal

LAYERS, DENSE, VOCAB = 4, 300_000, 2000
MODEL = ModelShape(64, 128, VOCAB, 8, 8, 64, 64, (LayerShape(DENSE),) * LAYERS, 0, torch.float32)
MATMUL = Curve(sizes=(1, 101), seconds=(1e-9, 101e-9))


def test_ranks_that_meet_wait_for_the_last_one() -> None:
    lag = random.uniform(0.1, 0.5)
    issue_s, pass_s, share_s, step_s = (random.uniform(1e-3, 1e-2) for _ in range(4))
    added = CallTimes(layer_s=issue_s / 2, pass_s=pass_s / 2, step_s=step_s / 2)
    known = {"issue_s": issue_s, "pass_s": pass_s, "share_s": share_s, "step_s": step_s, "added": added}
    late = ideal(matmul=MATMUL, lag=lag, **known)
    batch, size = 6, 4
    cached = (9000,) * batch
    weights = LAYERS * DENSE + VOCAB * 64
    for ranks, method, tokens, shared in (
        (size, "replicated", batch, 2),
        (size, "pass_q", 2, 1 + size),
        (1, "pass_q", batch, 0),
    ):
        work = Workload((1,) * batch, cached, ranks)
        dense = weights * tokens * 1e-9
        calls = LAYERS * issue_s * 1.5
        rest = calls + pass_s * 1.5 + shared * share_s + step_s * 1.5
        attention = LAYERS * LayerTimes(late, MODEL.attention(), work).predict(method).terms["attention"]
        if ranks > 1:
            rest += lag * (dense + calls + attention)
            # Ranks that attend to their own sequence first do not notice that the one before them is late meanwhile.
            rest -= attention / size if method == "pass_q" else 0.0
        plain = ttit_seconds(ideal(matmul=MATMUL), MODEL, work, method)
        assert plain == pytest.approx(dense + attention, rel=0.05)
        assert ttit_seconds(late, MODEL, work, method) - plain == pytest.approx(rest, rel=1e-6)


def test_passes_of_decoding_have_an_overhead_of_their_own() -> None:
    work = Workload((1,) * 3, (5,) * 3, 3)
    overheads = {"pass_q": 1e-2, DECODING: 1e-3}
    known = ideal(step_overhead_s=overheads)
    bare = ttit_seconds(ideal(), MODEL, work, "pass_q")
    assert ttit_seconds(known, MODEL, work, "pass_q") - bare == pytest.approx(LAYERS * 3 * 1e-3)
    older = ideal(step_overhead_s={"pass_q": 1e-2})
    assert ttit_seconds(older, MODEL, work, "pass_q") - bare == pytest.approx(LAYERS * 3 * 1e-2)


def test_every_tensor_parallel_rank_reads_the_whole_output_head() -> None:
    """`megakv.weights.placement.plan` cuts layers alone."""
    size, known = 4, ideal(matmul=MATMUL)
    larger, more = replace(MODEL, vocab=VOCAB + 700), 700 * 64 * MATMUL.at(1)
    workload = Workload((1,), (9000,), 1)
    before, after = (ttit_seconds(known, model, workload, "pass_q", tp_size=size) for model in (MODEL, larger))
    assert after - before == pytest.approx(more)
