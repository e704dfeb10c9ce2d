"""Plans are kept by rounded lengths, cover the exact ones, and are rank 0's on all ranks."""

import random
from typing import Any

import pytest

from megakv.base.partition import even
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.curves import Curve
from megakv.costmodel.memory import token_bytes
from megakv.costmodel.prefill import PrefillTimes
from megakv.forward.prefill_planner import PrefillPlanner, rounded
from megakv.runahead.chain_search import best_partition
from tests.measuring import count_calls
from tests.unit.costmodel.profiles import ideal
from tests.unit.costmodel.test_chain import attention_only, chain_seconds

MODEL = attention_only(4, dense=500_000)
MATMUL = Curve(sizes=(1, 101), seconds=(1e-9, 2e-9))


def planner(size: int = 4, **settings: Any) -> PrefillPlanner:
    link = Curve.affine(1e-4, 1e9)
    profile = ideal(seconds_per_pair=1e-9, exchange=link, collective=link, matmul=MATMUL)
    return PrefillPlanner(profile, MODEL, size, **{"alone_tokens": 10**6, **settings})


def test_rounding() -> None:
    assert [rounded(count) for count in (0, 1, 31, 32, 33, 8192, 8191, 8000, 10_000)] == [
        0, 1, 31, 32, 34, 8192, 8192, 7936, 10_240,
    ]  # fmt: skip
    for _ in range(1000):
        count = random.randint(1, 10**7)
        assert abs(rounded(count) - count) <= count / 31
        assert rounded(rounded(count)) == rounded(count)


def test_partitions_are_those_of_a_similar_prompt() -> None:
    plans = planner()
    exact = best_partition(plans.profile, MODEL, 8192, 4)
    assert plans.partition(8192) == exact
    for tokens in (8100, 8200, 8257):
        found = plans.partition(tokens)
        assert sum(found) == tokens
        assert max(abs(a / tokens - b / 8192) for a, b in zip(found, exact, strict=True)) < 1e-3
        best = chain_seconds(plans.profile, MODEL, best_partition(plans.profile, MODEL, tokens, 4)).seconds
        assert chain_seconds(plans.profile, MODEL, found).seconds < 1.01 * best


def test_seconds_of_the_candidates() -> None:
    plans = planner()
    work = Workload((4096,), (0,), 4)
    partition = even(4096, 4)
    times = PrefillTimes(plans.profile, MODEL, work)
    assert plans.seconds(work, lambda new, cached: even(new, 4)) == {
        "single": times.seconds("single"),
        "runahead": times.seconds("runahead", (partition,)),
        "pass_kv": times.seconds("pass_kv"),
        "pass_q": times.seconds("pass_q"),
    }


def test_one_rank_is_no_candidate_where_it_may_not_hold_the_prompt() -> None:
    def sizes(new: int, cached: int) -> tuple[int, ...]:
        return even(new, 4)

    assert "single" in planner().seconds(Workload((4096,), (0,), 4), sizes)
    assert "single" not in planner(alone_tokens=4095).seconds(Workload((4096,), (0,), 4), sizes)
    assert "single" not in planner().seconds(Workload((4096,), (1,), 4), sizes)
    assert token_bytes(MODEL) == 4 * 8 * 128 * 4 + (4 * 64 + 6 * 8 * 64) * 4


def test_known_plans_are_looked_up() -> None:
    plans = planner()
    lengths = [random.randint(8100, 8300) for _ in range(200)]
    for tokens in lengths[:3]:
        plans.partition(tokens)
        plans.seconds(Workload((tokens,), (0,), 4), plans.partition)

    def look_up() -> None:
        for tokens in lengths:
            plans.partition(tokens)
            plans.seconds(Workload((tokens,), (0,), 4), plans.partition)

    assert count_calls(look_up) / len(lengths) < 200
    assert len(plans._partitions) == len(plans._seconds) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_ragged_batches(size: int) -> None:
    plans = planner(size)
    work = Workload((5000, 0, 40), (0, 70, 300), size)
    seconds = plans.seconds(work, plans.partition)
    assert set(seconds) == {"runahead", "pass_kv", "pass_q"}
    assert all(0 < value < 10 for value in seconds.values())
