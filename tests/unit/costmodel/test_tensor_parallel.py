"""Sums over tensor-parallel ranks, by hand."""

import random

import pytest

from megakv.costmodel.curves import Curve
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.presets import PRESETS
from megakv.costmodel.tensor_parallel import all_reduce_seconds
from tests.unit.costmodel.profiles import fingerprint, ideal
from tests.unit.costmodel.test_chain import attention_only

BANDWIDTH, LATENCY = 1e9, 1e-3
LINK = Curve.affine(LATENCY, BANDWIDTH)


def test_a_ring_scatters_and_gathers() -> None:
    nbytes, ranks = random.randint(10**6, 10**8), random.randint(2, 9)
    steps = 2 * (ranks - 1)
    assert all_reduce_seconds(ideal(exchange=LINK), nbytes, ranks) == pytest.approx(
        steps * (LATENCY + nbytes / ranks / BANDWIDTH)
    )
    assert all_reduce_seconds(ideal(exchange=LINK), nbytes, 1) == 0
    assert all_reduce_seconds(ideal(exchange=LINK), 0, ranks) == 0


def test_hosts_sum_their_parts_over_the_links_between_them() -> None:
    slow = Curve.affine(1e-2, 1e7)
    profile = ideal(exchange=slow, exchange_inside=LINK, devices_per_host=4)
    inside, between = 6 * (LATENCY + 1e6 / BANDWIDTH), 2 * (1e-2 + 0.5e6 / 1e7)
    assert all_reduce_seconds(profile, 4e6, 8) == pytest.approx(inside + between)


def test_links_that_were_not_measured_are_not_guessed() -> None:
    assert all_reduce_seconds(ideal(exchange=LINK, fingerprint=fingerprint(hosts=2)), 10**6, 2) == 0


def test_a_layer_has_two_sums() -> None:
    model = attention_only(3, dense=500_000)
    tokens = 1000
    profile = ideal(exchange=LINK, exchange_inside=LINK)
    alone, both = TokenTimes(ideal(), model, tp_size=2), TokenTimes(profile, model, tp_size=2)
    one = all_reduce_seconds(profile, tokens * model.hidden * model.element_bytes, 2)
    assert both.layer(0, tokens) - alone.layer(0, tokens) == pytest.approx(2 * one, rel=1e-3)


def test_context_parallelism_scales_better_than_tensor_parallelism_over_hosts() -> None:
    """Figure 7 of context parallelism: all-reduces grow with hosts, the ring's share does not."""
    spec = PRESETS["h100-rdma"]
    nbytes = 128_000 * 16384 * 2
    sums = [all_reduce_seconds(spec.profile(tp_size=8 * hosts), nbytes, 8 * hosts) for hosts in (1, 2, 4, 8)]
    assert sums == sorted(sums)
