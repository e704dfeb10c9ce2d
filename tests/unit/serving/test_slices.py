"""Where a pass pauses: no slice longer than it may be, as few as there can be, whatever its parts take."""

import itertools
import random

import pytest

from megakv.serving.slices import Slices


def parts_of(layers: int, dense: float, attention: float, start: float) -> list[float]:
    """From the beginning to each stop, from stop to stop, and to the end."""
    return [start, *[attention, dense] * layers]


def fewest(parts: list[float], slice_s: float) -> int:
    """Slices, each as long as may be."""
    count, filled = 1, 0.0
    for part in parts:
        if filled and filled + part > slice_s:
            count, filled = count + 1, 0.0
        filled += part
    return count


def cut(slices: Slices, parts: list[float], first: int, slice_s: float) -> list[float]:
    """How long a pass goes on between its pauses."""
    taken, pause = [[]], first
    for stop, part in enumerate(parts):
        taken[-1].append(part)
        if stop >= pause and stop < len(parts) - 1:
            slices.went(taken[-1])
            pause = stop + slices.ahead(slice_s)
            taken.append([])
    return [sum(each) for each in taken]


@pytest.mark.parametrize("draw", range(20))
def test_slices_are_within_their_time_and_few(draw: int) -> None:
    layers, dense, attention = random.randint(8, 40), random.uniform(0.5, 2), random.uniform(0.2, 4)
    slices, slice_s = Slices(layers), random.uniform(1.1, 8) * max(dense, attention)
    tokens = random.randint(16, 2000)
    # Of the first pass the first slice is a guess; then all passes are as the one before, of fewer or more tokens.
    for number, grown in enumerate((1.0, 1.0, random.uniform(0.5, 1.0))):
        parts = [grown * part for part in parts_of(layers, dense, attention, 0.7 * dense)]
        seconds = grown * layers * (dense + attention)
        found = cut(slices, parts, slices.begin(int(tokens * grown), seconds, slice_s) or 0, slice_s)
        assert sum(found) == pytest.approx(sum(parts))
        if number:
            assert max(found) <= slice_s * 1.01
            assert len(found) == fewest(parts, slice_s) or number == 2


def test_a_part_longer_than_a_slice_is_one() -> None:
    slices = Slices(4)
    assert slices.begin(10, 80.0, 1.0) is None
    slices.went([5.0])
    assert [slices.ahead(1.0) for _ in itertools.repeat(None, 2)] == [1, 1]


def test_what_waits_already_may_not_wait_for_the_first_part() -> None:
    assert Slices(4).begin(10, 80.0, 4.0) is None


def test_what_fits_has_no_pause() -> None:
    slices = Slices(4)
    assert (slices.begin(10, 1.0, 2.0) or 0) >= 8
