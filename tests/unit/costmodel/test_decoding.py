"""A decoding step of ranks that meet in every layer, by hand."""

import random

import pytest
import torch

from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.curves import Curve
from megakv.costmodel.decoding import ttit_seconds
from megakv.costmodel.shape import LayerShape, ModelShape
from tests.unit.costmodel.profiles import ideal

LAYERS, DENSE, VOCAB = 4, 300_000, 2000
MODEL = ModelShape(64, 128, VOCAB, 8, 8, 64, 64, (LayerShape(DENSE),) * LAYERS, 0, torch.float32)
MATMUL = Curve(sizes=(1, 101), seconds=(1e-9, 101e-9))


def test_ranks_that_meet_wait_for_the_last_one() -> None:
    lag, issue_s, pass_s, share_s = (random.uniform(1e-3, 1e-2) for _ in range(4))
    late = ideal(matmul=MATMUL, lag=lag, issue_s=issue_s, pass_s=pass_s, share_s=share_s)
    batch, size = 6, 4
    cached = (100,) * batch
    weights = LAYERS * DENSE + VOCAB * 64
    for ranks, method, tokens, shared in (
        (size, "replicated", batch, 2),
        (size, "pass_q", 2, 1 + size),
        (1, "pass_q", batch, 0),
    ):
        work = Workload((1,) * batch, cached, ranks)
        dense = weights * tokens * 1e-9
        rest = LAYERS * issue_s + pass_s + shared * share_s
        if ranks > 1:
            rest += lag * (dense + LAYERS * issue_s)
        plain = ttit_seconds(ideal(matmul=MATMUL), MODEL, work, method)
        assert plain == pytest.approx(dense, rel=0.05)
        assert ttit_seconds(late, MODEL, work, method) - plain == pytest.approx(rest, rel=1e-6)
