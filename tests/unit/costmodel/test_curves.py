"""Curves through measured points: what lies between them, below the first and beyond the last."""

import random

import pytest

from megakv.costmodel.curves import AttentionTable, Curve
from tests.unit.costmodel.profiles import pair_table


def test_affine_times_are_met_exactly() -> None:
    latency, bandwidth = random.uniform(1e-6, 1e-3), random.uniform(1e8, 1e11)
    sizes = (10.0, 7e3, 3e6, 5e7)
    curve = Curve(sizes=sizes, seconds=tuple(latency + size / bandwidth for size in sizes))
    for size in (10.0, 11.5, 1e4, 4e7, 5e7, 9e8):
        assert curve.at(size) == pytest.approx(latency + size / bandwidth, rel=1e-9)
    assert curve.bandwidth == pytest.approx(bandwidth)
    assert curve.latency == pytest.approx(latency + 10 / bandwidth)


def test_ends_and_nothing() -> None:
    curve = Curve(sizes=(100.0, 200.0), seconds=(3.0, 5.0))
    assert (curve.at(0), curve.at(-1), curve.at(1), curve.at(100), curve.at(150)) == (0, 0, 3, 3, 4)
    assert curve.at(400) == pytest.approx(9)


def test_data_sheet() -> None:
    curve = Curve.affine(2e-6, 50e9)
    assert curve.at(50e6) == pytest.approx(1.002e-3)
    assert curve.bandwidth == pytest.approx(50e9)


def test_a_falling_end_still_has_a_bandwidth() -> None:
    noisy = Curve(sizes=(1.0, 10.0, 100.0), seconds=(1.0, 6.0, 5.0))
    assert noisy.bandwidth == pytest.approx(20)
    assert noisy.at(200) == pytest.approx(10)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ((1, 1), (1, 2), "must ascend"),
        ((2, 1), (1, 2), "must ascend"),
        ((1, 2), (1, 2, 3), "2 sizes with 3 seconds"),
        ((1, 2), (1, -1), "greater than 0"),
        ((1, 2), (1, float("nan")), "finite"),
        ((1, 2), (1, float("inf")), "finite"),
        ((0, 2), (1, 1), "greater than 0"),
        ((1,), (1,), "at least 2"),
    ],
)
def test_impossible_curves(sizes: tuple, seconds: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(sizes=sizes, seconds=seconds)


def test_table_scales_with_rows_keys_and_heads() -> None:
    rate = random.uniform(1e-11, 1e-8)
    table = pair_table(rate, heads=4)
    for heads, rows, keys in ((4, 3, 17), (4, 100.5, 999), (16, 5000, 3), (7, 2, 70000), (1, 4096, 4096)):
        # What does not grow with heads is the time of the smallest call.
        expected = table.call_s + (rate * 4 * rows * keys - table.call_s) * heads / 4
        assert table.block(heads, rows, keys) == pytest.approx(expected)
    assert table.block(4, 0, 10) == table.block(4, 10, 0) == table.square(4, 0) == 0
    assert table.square(4, 300) == pytest.approx(rate * 4 * 300 * 300 / 2)
    assert table.flops == pytest.approx(4 * 64 / rate)


def test_table_with_rows_cut_short() -> None:
    table = AttentionTable(
        kernel="flash",
        head_dim=64,
        heads=1,
        group=1,
        rows=(1, 10),
        keys=(10, 100),
        seconds=((1.0, 2.0), (4.0,)),
        causal=Curve(sizes=(1, 100), seconds=(1.0, 2.0)),
    )
    assert table.block(1, 10, 100) == pytest.approx(40)
    assert table.block(1, 5.5, 10) == pytest.approx(2.5)
    assert table.block(1, 20, 10) == pytest.approx(8)


@pytest.mark.parametrize(
    "changes",
    [{"rows": (2, 1)}, {"seconds": ((1.0,),)}, {"seconds": ((1.0,), ())}, {"kernel": "fast"}, {"heads": 0}],
)
def test_impossible_tables(changes: dict) -> None:
    values = pair_table(1.0).model_dump() | changes
    with pytest.raises(ValueError, match="validation error"):
        AttentionTable(**values)


def test_rows_between_two_sizes_of_tiles() -> None:
    """A kernel that takes 16 s for 256 rows and, with larger tiles, 40 s for 1,024: 500 rows are still slow ones."""
    table = AttentionTable(
        kernel="flash",
        head_dim=64,
        heads=1,
        group=1,
        rows=(1, 256, 1024),
        keys=(1, 10),
        seconds=((0.001, 0.01), (1.6, 16.0), (4.0, 40.0)),
        causal=Curve(sizes=(1, 100), seconds=(1.0, 2.0)),
    )
    for rows, expected in ((256, 16), (384, 24), (512, 32), (640, 40), (900, 40), (1024, 40), (2048, 80)):
        assert table.block(1, rows, 10) == pytest.approx(expected, rel=1e-3)
    # Few rows cost what lies between their neighbours.
    assert table.block(1, 128.5, 10) == pytest.approx(8, rel=1e-2)
