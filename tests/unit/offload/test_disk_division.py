"""Rows on disk: what they cost is divided as exactly as without a disk, token by token."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megakv.costmodel.offload import LayerCosts, split_seconds, steady_seconds
from megakv.costmodel.offload_disk import Lot, disk_seconds, mean_costs, pieces, placed, shown_rates
from megakv.offload.division import spread
from megakv.offload.scheduler import divide, split_point
from tests.unit.offload.test_scheduler import random_costs


def random_lot(generator: random.Random, most: int) -> Lot:
    """A sequence of which some rows lie on disk."""
    tokens = generator.randrange(0, most)
    inputs = generator.choice([tokens, generator.randrange(0, tokens + 1)])
    return Lot(tokens, inputs, generator.randrange(0, tokens + 1), generator.randrange(0, inputs + 1))


def sent_seconds(costs: LayerCosts, lots: Sequence[Lot], recomputed: int, on_host: int) -> tuple[float, float]:
    """Seconds of the link for activations, and for keys and values, token by token."""
    away = spread(on_host, [lot.rows_in_memory for lot in lots])
    splits = spread(recomputed, [max(0, lot.inputs - gone) for lot, gone in zip(lots, away, strict=True)])
    inputs = rows = 0.0
    for lot, gone, split in zip(lots, away, splits, strict=True):
        for token in range(gone, gone + split):
            inputs += costs.activation_s if token < lot.inputs_in_memory else costs.disk_activation_s
        for token in range(gone + split, lot.tokens):
            rows += costs.kv_s if token < lot.rows_in_memory else costs.disk_kv_s
    return inputs, rows


@pytest.mark.parametrize("seed", range(4))
def test_tokens_on_disk_equal_brute_force(seed: int) -> None:
    generator = random.Random(400 + seed)
    for _ in range(25):
        costs, lot, chunk = random_costs(generator), random_lot(generator, 30), generator.choice([1, 3, 8, 100])
        lots, tokens, most, host = (lot,), lot.tokens, lot.inputs, generator.choice([0, lot.rows_in_memory])
        plain = replace(costs, activation_s=0.0, kv_s=0.0)
        layer, steady = [], []
        for away in range(host + 1):
            for split in range(max(0, most - away) + 1):
                inputs, rows = sent_seconds(costs, lots, split, away)
                # With what is sent as the first and the last thing of the link's, all formulas stand as they are.
                own = replace(plain, head_s=costs.head_s + inputs, tail_s=costs.tail_s + rows)
                if not away:
                    layer.append(split_seconds(own, tokens, split))
                steady.append(steady_seconds(own, tokens, split, on_host=away, chunk=chunk))
        assert split_point(costs, tokens, most=most, lots=lots).seconds == pytest.approx(min(layer), rel=1e-9)
        found = divide(costs, tokens, chunk=chunk, host=host, most=most, lots=lots)
        assert found.seconds == pytest.approx(min(steady), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_pieces_of_many_sequences_are_what_is_sent(seed: int) -> None:
    generator = random.Random(500 + seed)
    for _ in range(25):
        costs = random_costs(generator)
        lots = [random_lot(generator, 20) for _ in range(generator.randrange(1, 6))]
        away = generator.randrange(0, sum(lot.rows_in_memory for lot in lots) + 1)
        found = pieces(costs, lots, away)
        gone = spread(away, [lot.rows_in_memory for lot in lots])
        last = sum(max(0, lot.inputs - count) for lot, count in zip(lots, gone, strict=True))
        assert found[0].first == 0 and found[-1].last == last
        # Between two levels at which all sequences give alike, a token is priced at their mean.
        slack = len(lots) * max(costs.kv_s, costs.disk_kv_s, costs.activation_s, costs.disk_activation_s)
        rest = sum(lot.tokens for lot in lots) - away
        for split in range(last + 1):
            inputs, rows = sent_seconds(costs, lots, split, away)
            exact = split in {piece.first for piece in found} or len(lots) == 1
            for own in {piece.costs for piece in found if piece.first <= split <= piece.last}:
                tolerance = 1e-9 * (inputs + rows) if exact else slack
                assert own.head_s - costs.head_s + split * own.activation_s == pytest.approx(
                    inputs, abs=tolerance + 1e-9
                )
                assert own.tail_s - costs.tail_s + (rest - split) * own.kv_s == pytest.approx(
                    rows, abs=tolerance + 1e-9
                )
            mean = mean_costs(costs, lots, split, away)
            assert mean.kv_s * (rest - split) == pytest.approx(rows, abs=slack if not exact else 1e-9 + 1e-9 * rows)


def test_without_a_disk_pieces_are_one() -> None:
    costs = LayerCosts(kv_s=2.0, activation_s=1.0, recompute_s=1.0, disk_kv_s=50.0, disk_activation_s=50.0)
    lots = [Lot(30, 20, 30, 20), Lot(7, 7, 7, 7)]
    assert not any(lot.on_disk for lot in lots)
    (piece,) = pieces(costs, lots, 5)
    assert (piece.costs.kv_s, piece.costs.activation_s) == (2.0, 1.0)
    assert piece.costs.head_s == piece.costs.tail_s == pytest.approx(0.0)
    assert mean_costs(costs, lots, 9, 5).kv_s == pytest.approx(2.0)


def test_the_slower_of_disk_and_link_sets_the_pace() -> None:
    assert disk_seconds(100, 10.0, 4.0) == 25.0
    assert disk_seconds(100, 10.0, 40.0) == disk_seconds(100, 10.0, 0.0) == 10.0
    # What most of the time was spent on is what a transfer shows.
    assert shown_rates(100, 0, 20.0, 10.0, 4.0) == (5.0, 0.0)
    assert shown_rates(100, 50, 30.0, 10.0, 4.0) == (0.0, 2.0)
    assert shown_rates(100, 10, 11.5, 10.0, 4.0) == pytest.approx((10.0, 0.0))
    assert shown_rates(100, 50, 4.0, 10.0, 4.0) == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(2))
def test_memory_is_filled_in_order(seed: int) -> None:
    generator = random.Random(700 + seed)
    for _ in range(50):
        tokens = [generator.randrange(0, 12) for _ in range(generator.randrange(1, 5))]
        row, inputs, memory = generator.randrange(1, 9), generator.randrange(0, 9), generator.randrange(0, 300)
        lots = placed(tokens, memory, row_bytes=row, input_bytes=inputs)
        assert [(lot.tokens, lot.inputs) for lot in lots] == [(n, n if inputs else 0) for n in tokens]
        ends = [(lot.rows_in_memory, n, row) for lot, n in zip(lots, tokens, strict=True)]
        first = [(lot.inputs_in_memory, n if inputs else 0, inputs) for lot, n in zip(lots, tokens, strict=True)]
        smaller = inputs < row
        order = first + ends if smaller else [each for pair in zip(ends, first, strict=True) for each in pair]
        left = memory
        for held, wanted, nbytes in order:
            assert 0 <= held <= wanted and (held == wanted or left - held * nbytes < nbytes)
            left -= held * nbytes
        assert left >= 0
