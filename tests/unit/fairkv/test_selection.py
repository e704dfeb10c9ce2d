"""The kept set is the one that sorting everything in one place gives, wherever heads and tokens are."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from megakv.fairkv.budgets import HeadBudgets, equal, shared
from megakv.fairkv.selection import choose, ranking_keys, thresholds


def alone(counts: torch.Tensor) -> torch.Tensor:
    return counts


def sorted_choice(scores: np.ndarray, budget: HeadBudgets) -> np.ndarray:
    """``[K, S]`` by sorting: each head's floor, then the best of the rest; ties to the lower slot, then head."""
    heads, length = scores.shape
    kept = np.zeros(scores.shape, dtype=bool)
    for head in range(heads):
        order = sorted(range(length), key=lambda slot: (-scores[head, slot], slot))
        kept[head, order[: budget.floors[head]]] = True
    rest = sorted(
        (-scores[head, slot], slot, head) for head in range(heads) for slot in range(length) if not kept[head, slot]
    )
    for _, slot, head in rest[: budget.total - int(budget.floors.sum())]:
        kept[head, slot] = True
    return kept


class Meeting:
    """Adds up what threads bring, as ranks would."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.brought: list[torch.Tensor | None] = [None] * size

    def member(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def add_up(counts: torch.Tensor) -> torch.Tensor:
            self.brought[rank] = counts
            self.barrier.wait()
            total = torch.stack([part for part in self.brought if part is not None]).sum(0)
            self.barrier.wait()
            return total

        return add_up


def spread_choice(scores: list[np.ndarray], budgets: list[HeadBudgets], tp: int, cp: int) -> list[np.ndarray]:
    """`choose` on ``tp x cp`` threads, tokens dealt out at random, heads in uneven runs."""
    heads = scores[0].shape[0]
    head_of = np.array_split(np.random.permutation(heads), tp)
    token_of = [np.random.randint(cp, size=score.shape[1]) for score in scores]
    rings = [Meeting(cp) for _ in range(tp)]
    world = Meeting(tp * cp)
    found = [np.zeros(score.shape, dtype=bool) for score in scores]

    def rank(t: int, c: int) -> None:
        mine = np.sort(head_of[t])
        slots = [np.flatnonzero(owner == c) for owner in token_of]
        local = [torch.from_numpy(score[mine][:, slot]) for score, slot in zip(scores, slots, strict=True)]
        masks = choose(
            local,
            slots,
            budgets,
            mine,
            counted=np.arange(len(mine)),
            over_tokens=rings[t].member(c),
            over_all=world.member(t * cp + c),
        )
        for target, slot, mask in zip(found, slots, masks, strict=True):
            target[np.ix_(mine, slot)] = mask.numpy()

    threads = [threading.Thread(target=rank, args=(t, c)) for t in range(tp) for c in range(cp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (4, 1), (1, 3), (3, 2)])
def test_kept_set_does_not_depend_on_the_spread(tp: int, cp: int, ties: bool) -> None:
    lengths = [37, 1, 200]
    scores = [np.random.rand(6, length).astype(np.float32) for length in lengths]
    if ties:
        scores = [np.round(score * 4) for score in scores]
    scores[2][:, -5:] = np.inf
    budgets = [shared(9, 6, 0.3, 2), equal(1, 6), HeadBudgets(np.array([0, 200, 3, 50, 7, 5]), 265)]
    expected = [sorted_choice(score, budget) for score, budget in zip(scores, budgets, strict=True)]
    found = spread_choice(scores, budgets, tp, cp)
    for one, other, budget in zip(found, expected, budgets, strict=True):
        assert np.array_equal(one, other)
        assert one.sum() == budget.total


def test_copies_of_a_head_are_counted_once() -> None:
    scores = np.random.rand(3, 50).astype(np.float32)
    budget = shared(10, 3, 0.0, 0)
    both = Meeting(2)
    found: dict[int, np.ndarray] = {}

    def rank(index: int, heads: list[int], counted: list[int]) -> None:
        masks = choose(
            [torch.from_numpy(scores[heads])],
            [np.arange(50)],
            [budget],
            np.array(heads),
            counted=np.array(counted, dtype=np.int64),
            over_tokens=alone,
            over_all=both.member(index),
        )
        found[index] = masks[0].numpy()

    threads = [threading.Thread(target=rank, args=args) for args in ((0, [0, 1], [0, 1]), (1, [1, 2], [1]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sorted_choice(scores, budget)
    assert np.array_equal(found[0], expected[:2])
    assert np.array_equal(found[1], expected[1:])


def test_thresholds_of_odd_groups() -> None:
    keys = torch.tensor([5, 9, 7, 3, 8])
    groups = torch.tensor([0, 0, 0, 2, 2])
    found = thresholds(keys, groups, torch.tensor([2, 4, 9]), alone)
    assert found[0] == 7
    assert (keys[3:] >= found[2]).all()
    assert found[1] > 9
    nothing = thresholds(keys, groups, torch.tensor([0, 0, 0]), alone)
    assert (nothing > 9).all()


def test_keys_order_by_score_then_slot_then_head() -> None:
    scores = torch.tensor([[0.0, torch.inf, torch.nan], [1e-45, 3.4e38, 0.0]])
    keys = ranking_keys(scores, torch.tensor([4, 9, 16777215]), torch.tensor([0, 255]))
    assert len(set(keys.flatten().tolist())) == 6
    order = keys.flatten().argsort(descending=True).tolist()
    # inf, 3.4e38, 1e-45, then the zeros by slot: (head 0, slot 4), then slot 16777215 of head 0 before head 255.
    assert order == [1, 4, 3, 0, 2, 5]
    assert keys.min() >= 0
