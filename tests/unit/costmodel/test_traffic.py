"""Bytes of a whole pass: what the simulated ranks send, and closed forms where all is even."""

import random
from dataclasses import replace

import pytest

from megakv.costmodel.context_parallel import Workload, pass_bytes
from megakv.costmodel.dense import all_reduce_bytes
from megakv.costmodel.prefill import METHODS, PrefillTimes
from tests.unit.costmodel.test_simulation import machine, shape


@pytest.mark.parametrize("method", METHODS)
def test_bytes_of_a_prompt_are_those_of_the_simulated_run(method: str) -> None:
    size, tp = 3, random.choice((1, 2))
    new, cached = tuple(6 * random.randint(10, 80) for _ in range(2)), (random.randint(0, 99), 0)
    if method == "runahead":
        cached = (0, 0)
    model, workload = shape(random.randint(2, 5)), Workload(new, cached, size)
    times = PrefillTimes(machine(), model, workload, tp_size=tp, chunk_tokens=100)
    cuts = tuple((count // 2, count // 3, count - count // 2 - count // 3) for count in new)
    partitions = cuts if method == "runahead" else None
    played = times.play(method, partitions)
    sent = [sum(each.bytes_sent for each in played.traffic(rank)) for rank in range(size * tp)]
    found = pass_bytes(model, workload, method, tp_size=tp, partitions=partitions)
    assert sum(found.values()) == max(sent)
    assert ("all_reduce" in found) == (tp > 1)


def test_one_rank_sends_nothing_and_tensor_parallelism_its_sums() -> None:
    model = shape(4)
    tokens = random.randint(10, 99)
    assert pass_bytes(model, Workload((tokens,), (5,), 1), "pass_kv") == {}
    row = model.hidden * model.element_bytes
    whole, last = (2 * all_reduce_bytes(count * row, 4) for count in (tokens, 1))
    assert pass_bytes(model, Workload((tokens,), (5,), 1), "single", tp_size=4) == {"all_reduce": 3 * whole + last}


def test_decoding_shards_or_replicates_queries() -> None:
    """Of two sequences on four ranks two have a query; replicated, all ranks tell each other all parts."""
    model = replace(shape(3), layers=shape(1).layers * 3)
    attention, step = model.attention(), Workload((1, 1), (400, 399), 4)
    sent = pass_bytes(model, step, "pass_q")
    assert sent["pass_q_return"] == 3 * 2 * attention.partial_row_bytes
    assert sent["pass_q"] == 3 * 2 * attention.query_row_bytes
    assert set(sent) == {"pass_q", "pass_q_return"}
    assert pass_bytes(model, step, "replicated") == {"replicated": 3 * 3 * 2 * attention.partial_row_bytes}
