"""The search finds what measuring everything finds, in a fraction of the evaluations."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from megakv.base.partition import even
from megakv.runahead.grid import Grid
from megakv.runahead.search import PartitionSearch, SearchResult
from tests.unit.runahead.chains import SimulatedChain, all_partitions

PAPER = Grid(96, 4, 2)
EVERY = all_partitions(96, 4, 2)
MOST_EVALUATIONS = 810
MODELS = 4
PLANNED = 6
"""Models of a search that leaves out what promises little; on a few the best is where little was promised."""


def excess(chain: SimulatedChain, result: SearchResult, every: np.ndarray) -> float:
    """How much slower than the best of all partitions the found one is."""
    return float(chain.seconds(np.array([result.partition]))[0] / chain.seconds(every).min() - 1)


def mostly_best(slower: list[float]) -> bool:
    """Whether at least 4 of 6 models are within 1% of the best."""
    assert len(slower) == PLANNED
    return sorted(slower)[3] <= 0.01


def test_within_a_hundredth_of_the_exhaustive_best() -> None:
    for _ in range(MODELS):
        seed = random.randrange(10**9)
        chain = SimulatedChain.any(96, random.Random(seed))
        ask = chain.evaluator()
        result = PartitionSearch(PAPER, ask, full_grid=True).run()
        assert len(ask.asked) == len(set(ask.asked)) == result.evaluations <= MOST_EVALUATIONS, seed
        assert excess(chain, result, EVERY) <= 0.01, seed
        assert result.seconds == ask(result.partition) and result.even_seconds == ask((24, 24, 24, 24))
        assert {PAPER.partition(row) for row in PAPER.coarse()} <= {trial.partition for trial in result.trials}


def test_pruned_it_needs_a_tenth_of_the_evaluations() -> None:
    """At least 4 of 6 models are within 1% of the best, and of those with usual links all within 10%."""
    usual, slower = [], []
    for _ in range(PLANNED):
        seed = random.randrange(10**9)
        chain = SimulatedChain.usual(96, random.Random(seed))
        ask = chain.evaluator()
        result = PartitionSearch(PAPER, ask).run()
        assert len(ask.asked) == len(set(ask.asked)) == result.evaluations <= MOST_EVALUATIONS // 10, seed
        usual.append(excess(chain, result, EVERY))
        anyone = SimulatedChain.any(96, random.Random(seed))
        slower.append(excess(anyone, PartitionSearch(PAPER, anyone.evaluator()).run(), EVERY))
    assert mostly_best(usual) and max(usual) <= 0.1 and mostly_best(slower), (usual, slower)


def test_a_cost_model_that_is_off_leads_to_the_best_all_the_same() -> None:
    """Its constants are all wrong by some 20%, each by its own part.

    At least 4 of 6 models are within 1% of the best, and all within 20%.
    """
    slower = []
    for _ in range(PLANNED):
        rng = random.Random(seed := random.randrange(10**9))
        chain = SimulatedChain.usual(96, rng)
        names = ("before", "after", "pair", "carry", "message", "receive")
        off = {name: getattr(chain, name) * math.exp(0.2 * rng.gauss(0, 1)) for name in names}
        predicted = PAPER.partition(np.cumsum(EVERY[replace(chain, **off).seconds(EVERY).argmin()])[:-1])
        result = PartitionSearch(PAPER, chain.evaluator(), seeds=[predicted]).run()
        assert result.evaluations <= MOST_EVALUATIONS // 10, seed
        slower.append(excess(chain, result, EVERY))
    assert mostly_best(slower) and max(slower) <= 0.2, slower


@pytest.mark.parametrize("size", [2, 3, 5])
def test_other_numbers_of_ranks(size: int) -> None:
    tokens, unit = {2: (1000, 7), 3: (301, 3), 5: (96, 4)}[size]
    every = all_partitions(tokens, size, unit)
    every[:, -1] += tokens - every.sum(axis=1)
    for _ in range(4):
        seed = random.randrange(10**9)
        chain = SimulatedChain.usual(tokens, random.Random(seed))
        result = PartitionSearch(Grid(tokens, size, unit), chain.evaluator()).run()
        assert excess(chain, result, every) <= 0.01, seed


def test_many_ranks_cost_few_evaluations() -> None:
    grid = Grid(16384, 8, 128)
    for _ in range(3):
        seed = random.randrange(10**9)
        chain = SimulatedChain.usual(16384, random.Random(seed))
        result = PartitionSearch(grid, chain.evaluator()).run()
        assert result.evaluations <= 400
        assert result.seconds <= result.even_seconds
        assert sum(result.partition) == 16384


def test_seeds_are_measured_first_and_never_lost() -> None:
    for _ in range(4):
        chain = SimulatedChain.any(96, random.Random(random.getrandbits(32)))
        plain = PartitionSearch(PAPER, chain.evaluator()).run()
        seeded = PartitionSearch(PAPER, chain.evaluator(), seeds=[plain.partition]).run()
        assert seeded.seconds <= plain.seconds
        assert plain.partition in [trial.partition for trial in seeded.trials[:2]]


def test_noise_is_measured_again() -> None:
    slower = []
    for _ in range(20):
        rng = random.Random(random.getrandbits(32))
        chain = SimulatedChain.any(96, rng)
        ask = chain.evaluator(0.03, rng)
        result = PartitionSearch(PAPER, ask, finalists=4, rounds=3).run()
        assert len(ask.asked) == len(result.trials) >= result.evaluations + 3 + 2 + 2
        # Four of the best, then two of them twice, and even each time unless it is one of them.
        rounds = [trial.partition for trial in result.trials if trial.round]
        assert rounds.count((24, 24, 24, 24)) >= 3 and rounds.count(result.partition) >= 3
        times = [trial.seconds for trial in result.trials if trial.partition == result.partition]
        assert len(times) >= 4 and result.seconds == sorted(times[-3:])[1]
        slower.append(excess(chain, result, EVERY))
    assert np.mean(slower) < 0.03


def test_noise_does_not_choose() -> None:
    """Times that scatter by 3% cost the partition less than a percent: what else runs only adds to them.

    A mean of 32 models; that of all is 0.3%, in 66 trials.
    """
    slower, trials = [], []
    for _ in range(32):
        rng = random.Random(random.getrandbits(32))
        chain = SimulatedChain.usual(96, rng)
        result = PartitionSearch(PAPER, chain.evaluator(0.03, rng), finalists=4, rounds=3).run()
        slower.append(excess(chain, result, EVERY))
        trials.append(len(result.trials))
    assert np.mean(slower) < 0.01 and np.mean(trials) < 81


def test_what_was_slower_than_even_at_the_end_is_not_chosen() -> None:
    """On a machine where there is nothing but noise."""
    for _ in range(5):
        result = PartitionSearch(PAPER, lambda _: random.uniform(1, 2), finalists=4, rounds=3).run()
        times = {
            partition: sorted([trial.seconds for trial in result.trials if trial.partition == partition][-3:])
            for partition in (result.partition, (24, 24, 24, 24))
        }
        best, first = times.values() if len(times) == 2 else 2 * list(times.values())
        assert any(mine <= others for mine, others in zip(best, first, strict=True))
        assert (result.seconds, result.even_seconds) == (best[1], first[1])
        assert result.evaluations <= 1 + 32 * 3 + 6, "it ends all the same"


def test_what_is_left_is_estimated() -> None:
    left: list[int] = []
    chain = SimulatedChain.any(96, random.Random(random.getrandbits(32)))
    for full_grid in (False, True):
        left.clear()
        PartitionSearch(
            PAPER,
            chain.evaluator(),
            full_grid=full_grid,
            finalists=3,
            rounds=2,
            record=lambda _, rest: left.append(rest),
        ).run()
        assert left[-1] == 0 and min(left) == 0
        assert 10 < left[0] < 810
        # What is found makes a level longer, by the moves that are tried again at most; nothing else does.
        assert full_grid or max(np.diff(left)) <= 12


def test_impossible_times_are_refused() -> None:
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a positive time was expected"):
            PartitionSearch(PAPER, lambda _, seconds=seconds: seconds).run()  # type: ignore[misc]


def test_prompts_that_leave_no_choice() -> None:
    for tokens, size in ((4, 4), (5, 4), (2, 2), (9, 8)):
        result = PartitionSearch(Grid(tokens, size, 1), lambda _: 1.0).run()
        assert sum(result.partition) == tokens and min(result.partition) >= 1
        assert result.partition == even(tokens, size)
