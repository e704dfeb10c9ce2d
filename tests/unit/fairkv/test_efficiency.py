"""Utilisation at the barrier, and Equation 5."""

import numpy as np
import pytest

from megakv.base.loads import barrier_utilisation, busy_rates, efficiency
from tests.unit.fairkv.instances import RANDOM


def test_what_equation_5_does_not_see() -> None:
    """The slowest rank is another one in every layer: equal sums, and every rank waits half of the time."""
    loads = [[4.0, 0.0], [0.0, 4.0]]
    assert efficiency(loads) == 1.0
    assert barrier_utilisation(loads) == 0.5
    assert busy_rates(loads) == [0.5, 0.5]


def test_by_hand() -> None:
    loads = [[4.0, 2.0, 0.0], [1.0, 1.0, 1.0]]
    assert barrier_utilisation(loads) == pytest.approx((0.5 + 1) / 2)
    assert efficiency(loads) == pytest.approx((5 + 3 + 1) / 3 / 5)
    assert busy_rates(loads) == pytest.approx([1.0, 3 / 5, 1 / 5])


def test_one_layer_and_one_rank() -> None:
    row = RANDOM.uniform(1, 9, 6)
    assert barrier_utilisation([row]) == pytest.approx(efficiency([row]))
    assert barrier_utilisation(row[:, None]) == efficiency(row[:, None]) == 1.0


def test_nothing_to_do_keeps_nobody_waiting() -> None:
    assert barrier_utilisation([[0, 0], [0, 0]]) == efficiency([[0, 0]]) == 1.0
    assert busy_rates([[0, 0]]) == [1.0, 1.0]
    assert barrier_utilisation([[0, 0], [2, 1]]) == pytest.approx(0.875)


@pytest.mark.parametrize("measure", [barrier_utilisation, efficiency, busy_rates])
@pytest.mark.parametrize(
    ("loads", "message"),
    [([1.0, 2.0], r"shape \[2\]"), ([[]], r"shape \[1, 0\]"), ([[1, -1]], "not negative"), ([[1, np.nan]], "finite")],
)
def test_impossible_loads(measure: object, loads: list, message: str) -> None:
    assert callable(measure)
    with pytest.raises(ValueError, match=message):
        measure(loads)
