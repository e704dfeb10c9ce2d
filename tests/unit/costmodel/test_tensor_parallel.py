"""Sums over tensor-parallel ranks, by hand."""

import math
import random

import pytest

from megakv.costmodel.curves import Curve
from megakv.costmodel.dense import TokenTimes, all_reduce_seconds
from megakv.costmodel.presets import PRESETS
from tests.unit.costmodel.profiles import fingerprint, ideal
from tests.unit.costmodel.test_chain import attention_only

BANDWIDTH, LATENCY = 1e9, 1e-3
LINK = Curve.affine(LATENCY, BANDWIDTH)


def test_a_ring_scatters_and_gathers_or_halves_are_exchanged() -> None:
    ranks, large, small = random.choice((3, 5, 6, 7)), random.uniform(1e9, 1e10), random.uniform(1, 1e3)
    profile = ideal(exchange=LINK)
    ring = 2 * (ranks - 1) * (LATENCY + large / ranks / BANDWIDTH)
    assert all_reduce_seconds(profile, large, ranks) == pytest.approx(ring)
    halves = 2 * math.ceil(math.log2(ranks))
    assert all_reduce_seconds(profile, small, ranks) == pytest.approx(halves * LATENCY, rel=0.01)
    assert all_reduce_seconds(profile, large, 1) == all_reduce_seconds(profile, 0, ranks) == 0


def test_hosts_sum_their_parts_over_the_links_between_them() -> None:
    slow = Curve.affine(1e-2, 1e7)
    profile = ideal(exchange=slow, exchange_inside=LINK, devices_per_host=4)
    # Both kinds of links are busy at once; the faster one adds its latency.
    between = 2 * (1e-2 + 0.5e6 / 1e7)
    assert all_reduce_seconds(profile, 4e6, 8) == pytest.approx(between + 4 * LATENCY, rel=1e-3)
    assert all_reduce_seconds(profile, 4e6, 4) == pytest.approx(4 * LATENCY + 6e6 / BANDWIDTH, rel=1e-3)


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
