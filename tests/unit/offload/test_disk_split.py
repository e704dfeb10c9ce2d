"""Rows on disk: what they cost is divided as exactly as without a disk, token by token."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megakv.offload.kvpr import KVPR, split_seconds
from megakv.offload.method import spread, steady_split
from megakv.offload.prices import GroupPrices, LayerPrices, Placement, disk_seconds, placed
from tests.unit.offload.test_methods import random_costs


def random_lot(generator: random.Random, most: int) -> Placement:
    """A sequence of which some rows lie on disk."""
    tokens = generator.randrange(0, most)
    inputs = generator.choice([tokens, generator.randrange(0, tokens + 1)])
    return Placement(tokens, inputs, generator.randrange(0, tokens + 1), generator.randrange(0, inputs + 1))


def sent_seconds(
    costs: LayerPrices, placements: Sequence[Placement], recomputed: int, on_host: int
) -> tuple[float, float]:
    """Seconds of the link for activations, and for keys and values, token by token."""
    away = spread(on_host, [placement.rows_in_memory for placement in placements])
    splits = spread(
        recomputed, [max(0, placement.inputs - gone) for placement, gone in zip(placements, away, strict=True)]
    )
    inputs = rows = 0.0
    for placement, gone, split in zip(placements, away, splits, strict=True):
        for token in range(gone, gone + split):
            inputs += costs.activation_s if token < placement.inputs_in_memory else costs.disk_activation_s
        for token in range(gone + split, placement.tokens):
            rows += costs.kv_s if token < placement.rows_in_memory else costs.disk_kv_s
    return inputs, rows


@pytest.mark.parametrize("seed", range(4))
def test_tokens_on_disk_equal_brute_force(seed: int) -> None:
    generator = random.Random(400 + seed)
    for _ in range(25):
        costs, placement, chunk = random_costs(generator), random_lot(generator, 30), generator.choice([1, 3, 8, 100])
        host = generator.choice([0, placement.rows_in_memory])
        given = GroupPrices(costs, placement.tokens, placement.inputs, host, 0, chunk, (placement,))
        plain = replace(costs, activation_s=0.0, kv_s=0.0)
        layer, steady = [], []
        for away in range(host + 1):
            for split in range(max(0, placement.inputs - away) + 1):
                inputs, rows = sent_seconds(costs, (placement,), split, away)
                # With what is sent as the first and the last thing of the link's, all formulas stand as they are.
                own = GroupPrices(
                    replace(plain, head_s=costs.head_s + inputs, tail_s=costs.tail_s + rows),
                    *(placement.tokens, placement.inputs, host, 0, chunk),
                )
                if not away:
                    layer.append(float(split_seconds(own, split)))
                steady.append(float(own.steady_seconds(split, away)))
        whole = KVPR().split(given)
        assert (whole is None) == (placement.inputs == 0)
        if whole is not None:
            assert split_seconds(given, whole.recomputed) == pytest.approx(min(layer), rel=1e-9)
        found = steady_split(given, recompute=True, host=True)
        assert given.steady_seconds(found.recomputed, found.on_host) == pytest.approx(min(steady), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_many_sequences_are_what_is_sent(seed: int) -> None:
    generator = random.Random(500 + seed)
    for _ in range(25):
        costs = random_costs(generator)
        placements = tuple(random_lot(generator, 20) for _ in range(generator.randrange(1, 6)))
        away = generator.randrange(0, sum(placement.rows_in_memory for placement in placements) + 1)
        gone = spread(away, [placement.rows_in_memory for placement in placements])
        last = sum(max(0, placement.inputs - count) for placement, count in zip(placements, gone, strict=True))
        given = GroupPrices(costs, sum(placement.tokens for placement in placements), placements=placements)
        # Where tokens cannot be divided evenly, each sequence counts with a fraction of one.
        slack = 2 * len(placements) * max(costs.kv_s, costs.disk_kv_s, costs.activation_s, costs.disk_activation_s)
        for split in range(last + 1):
            expected = sent_seconds(costs, placements, split, away)
            tolerance = 1e-9 * sum(expected) + 1e-9 if len(placements) == 1 else slack
            assert given.sent_seconds(split, away) == pytest.approx(expected, abs=tolerance)


def test_without_a_disk_tokens_cost_alike() -> None:
    costs = LayerPrices(kv_s=2.0, activation_s=1.0, recompute_s=1.0, disk_kv_s=50.0, disk_activation_s=50.0)
    placements = (Placement(30, 20, 30, 20), Placement(7, 7, 7, 7))
    assert not any(placement.on_disk for placement in placements)
    assert GroupPrices(costs, 37, placements=placements).sent_seconds(9, 5) == pytest.approx((9.0, 46.0))
    assert GroupPrices(costs, 37).sent_seconds(9, 5) == pytest.approx((9.0, 46.0))


def test_the_slower_of_disk_and_link_sets_the_pace() -> None:
    assert disk_seconds(100, 10.0, 4.0) == 25.0
    assert disk_seconds(100, 10.0, 40.0) == disk_seconds(100, 10.0, 0.0) == 10.0


@pytest.mark.parametrize("seed", range(2))
def test_memory_is_filled_in_order(seed: int) -> None:
    generator = random.Random(700 + seed)
    for _ in range(50):
        tokens = [generator.randrange(0, 12) for _ in range(generator.randrange(1, 5))]
        row, inputs, memory = generator.randrange(1, 9), generator.randrange(0, 9), generator.randrange(0, 300)
        placements = placed(tokens, memory, row_bytes=row, input_bytes=inputs)
        assert [(placement.tokens, placement.inputs) for placement in placements] == [
            (n, n if inputs else 0) for n in tokens
        ]
        ends = [(placement.rows_in_memory, n, row) for placement, n in zip(placements, tokens, strict=True)]
        first = [
            (placement.inputs_in_memory, n if inputs else 0, inputs)
            for placement, n in zip(placements, tokens, strict=True)
        ]
        smaller = inputs < row
        order = first + ends if smaller else [each for pair in zip(ends, first, strict=True) for each in pair]
        left = memory
        for held, wanted, nbytes in order:
            assert 0 <= held <= wanted and (held == wanted or left - held * nbytes < nbytes)
            left -= held * nbytes
        assert left >= 0
