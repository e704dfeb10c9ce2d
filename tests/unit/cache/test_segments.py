"""Rows in segments do what lists of rows do, whatever forks, cuts and shared runs come in whatever order."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from megakv.cache.dense import DenseStore
from megakv.cache.segments import MOST_SEGMENTS, SegmentedRows

HEADS, DIM, VALUES = 2, 3, 2


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(HEADS, count, DIM), torch.randn(HEADS, count, VALUES)


def list_of(keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.cat([keys, values], dim=2).unbind(1))


class Checked:
    """Rows, and the plain list that they stand for; the first `gone` ones are not asked for."""

    def __init__(self, held: SegmentedRows, plain: list[torch.Tensor]):
        self.held, self.plain, self.gone = held, plain, held.gone

    def check(self) -> None:
        segments = self.held.segments()
        found = [row for segment in segments for row in list_of(*segment)]
        assert self.held.length == len(self.plain) and self.held.gone == self.gone
        assert len(segments) <= MOST_SEGMENTS + 1 and all(keys.shape[1] for keys, _ in segments)
        assert len(found) == len(self.plain) - self.gone
        assert all(map(torch.equal, found, self.plain[self.gone :]))


@pytest.mark.parametrize("longest", [3, 60, 700])
def test_random_operations_on_forks_and_shared_runs(longest: int) -> None:
    random = np.random.default_rng()
    absent = int(random.integers(0, 4))
    first = SegmentedRows(rows(0), int(random.integers(2, 20)), absent)
    every = [Checked(first, [torch.empty(0)] * absent)]
    spans: list[tuple[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]]] = []
    for _ in range(120):
        one = every[int(random.integers(len(every)))]
        length = len(one.plain)
        match random.choice(["extend", "single", "fork", "cut", "forget", "share", "append", "join", "expect"]):
            case "extend" | "single" as kind:
                keys, values = rows(1 if kind == "single" else int(random.integers(0, longest)))
                for place, new in zip(one.held.extend(keys.shape[1]), (keys, values), strict=True):
                    place[:] = new
                one.plain += list_of(keys, values)
            case "fork":
                every.append(Checked(one.held.fork(), list(one.plain)))
            case "cut":
                kept = int(random.integers(max(0, length - longest), length + 1))
                one.held.truncate(kept)
                del one.plain[kept:]
                one.gone = min(one.gone, kept)
            case "forget":
                one.gone = int(random.integers(one.gone, length + 1)) if random.random() < 0.3 else one.gone
                one.held.forget(one.gone)
            case "share" if length > one.gone:
                start, stop = sorted(random.integers(one.gone, length + 1, size=2).tolist())
                spans.append((one.held.share(start, stop), one.plain[start:stop]))
            case "append" if spans:
                runs, plain = spans[int(random.integers(len(spans)))]
                one.held.append_shared(runs)
                one.plain += plain
            case "join":
                one.held.joined()
            case "expect":
                one.held.expect(length + int(random.integers(longest)))
        if len(every) > 6:
            del every[int(random.integers(len(every)))]
        for each in every:
            each.check()
        for runs, plain in spans:
            assert all(map(torch.equal, [row for run in runs for row in list_of(*run)], plain))


def test_a_fork_and_what_is_appended_to_it_copy_no_row() -> None:
    store = DenseStore(1)
    store.append(0, *rows(1000))
    size = store.nbytes()
    twin = store.fork()
    for each in (store, twin):
        each.append(0, *rows(1))
        (keys, _), *_ = each.runs(0)
        assert keys.data_ptr() == store.runs(0)[0][0].data_ptr() and each.nbytes() < 1.04 * size
        assert len(each.runs(0)) == 2


def test_who_comes_first_goes_on_in_place_behind_shared_rows() -> None:
    held = SegmentedRows(rows(0), 16)
    held.expect(300)
    held.extend(200)
    twin = held.fork()
    for _ in range(100):
        held.extend(1)
        held.share(0, held.length)
    assert len(held.segments()) == 1
    twin.extend(1)
    assert [keys.shape[1] for keys, _ in twin.segments()] == [200, 1]


def test_neighbours_of_one_buffer_are_one_segment_again() -> None:
    held, other = SegmentedRows(rows(0), 16), SegmentedRows(rows(0), 16)
    held.expect(90 * 60)
    for _ in range(90):
        held.extend(60)
        other.append_shared(held.share(held.length - 60, held.length))
    ((keys, _),) = other.segments()
    assert keys.data_ptr() == held.segments()[0][0].data_ptr() and keys.shape[1] == 90 * 60


@pytest.mark.parametrize("lengths", [(5, 5, 5), (7, 7)])
def test_prompts_of_a_pass_are_held_apart(lengths: tuple[int, ...]) -> None:
    """Those of one length are stored in one copy; each goes on, is cut and is copied as if it had come alone."""
    k, v = (torch.randn(2, sum(lengths), dim) for dim in (8, 6))
    bounds = np.cumsum([0, *lengths])
    together, apart = DenseStore(len(lengths)), DenseStore(len(lengths))
    assert together.hold_alike(len(lengths), k, v) and not together.hold_alike(len(lengths), k, v)
    assert not DenseStore(1 + len(lengths)).hold_alike(len(lengths), k, v)
    for sequence, own in enumerate(pairwise(bounds.tolist())):
        apart.append(sequence, k[:, slice(*own)], v[:, slice(*own)])
    k.zero_()

    def same() -> None:
        for sequence in range(len(lengths)):
            assert together.rows(sequence) == apart.rows(sequence)
            for one, other in zip(*(zip(*each.runs(sequence), strict=True) for each in (together, apart)), strict=True):
                assert torch.equal(torch.cat(one, dim=1), torch.cat(other, dim=1))

    same()
    twin = together.fork()
    for sequence in (0, len(lengths) - 1):
        more = torch.randn(2, 3, 8), torch.randn(2, 3, 6)
        for store in (together, apart):
            store.append(sequence, *more)
            store.crop(sequence, store.rows(sequence) - 1)
    same()
    assert twin.rows(0) == lengths[0] and together.nbytes() >= apart.nbytes() - 1
    together.reorder([0] * len(lengths))
    apart.reorder([0] * len(lengths))
    same()
