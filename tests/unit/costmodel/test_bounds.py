"""Lower bounds: the paper's closed forms, and what the chain comes to without its links."""

import random

import pytest

from megakv.base.partition import even
from megakv.costmodel.context_parallel import causal_bound, dense_bound
from megakv.costmodel.curves import Curve
from tests.unit.costmodel.profiles import ideal, without_links
from tests.unit.costmodel.test_chain import attention_only, chain_seconds


def test_dense_bound_is_the_area_of_the_staircase() -> None:
    """Figure 2: p rectangles of C/p rows, the i-th of i C/p columns, over p ranks, where one rank computes C x C."""
    for ranks in (1, 2, 3, 4, 8, 16):
        context = 96.0
        area = sum(context / ranks * (step * context / ranks) for step in range(1, ranks + 1)) / ranks
        assert dense_bound(context**2, ranks) == pytest.approx(area)
    assert dense_bound(8.0, 1) == 8
    assert dense_bound(8.0, 2) == 3
    assert dense_bound(16.0, 4) == 2.5


def test_dense_attention_gains_more_than_one_rank_each() -> None:
    for ranks in (2, 4, 8):
        assert dense_bound(1.0, ranks) < causal_bound(1.0, ranks) == 1 / ranks
        # From 2 ranks to 4 it is 2.4 times, not 2.
    assert dense_bound(1.0, 2) / dense_bound(1.0, 4) == pytest.approx(2.4)


def test_no_chain_is_faster_than_without_its_links() -> None:
    for _ in range(20):
        link = Curve.affine(random.uniform(0, 1e-3), 10 ** random.uniform(7, 10))
        profile = ideal(exchange=link, exposed=(random.random(), random.random()))
        size, tokens = random.randint(2, 6), random.randint(100, 20_000)
        model, partition = attention_only(random.randint(2, 5)), even(tokens, size)
        free = chain_seconds(without_links(profile), model, partition).seconds
        assert free <= chain_seconds(profile, model, partition).seconds
        alone = chain_seconds(profile, model, (0,) * (size - 1) + (tokens,)).seconds
        assert causal_bound(alone, size) < free
