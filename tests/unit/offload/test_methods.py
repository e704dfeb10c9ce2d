"""Every method's split is what trying every integer finds, on random machines."""

import math
import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from megakv.offload.kvpr import KVPR, split_seconds
from megakv.offload.method import spread, steady_split
from megakv.offload.prices import GroupPrices, LayerPrices, WeightTimes
from megakv.offload.steady import All, Chunked
from tests.measuring import count_calls

INSTANCES = 300


def random_costs(generator: random.Random) -> LayerPrices:
    """A machine of any kind: links, processors and latencies over several orders of magnitude, some of them free."""

    def cost(scale: float, free: float = 0.15) -> float:
        return 0.0 if generator.random() < free else scale * 10 ** generator.uniform(-1.5, 1.5)

    return LayerPrices(
        kv_s=cost(1.0, 0.02),
        activation_s=cost(0.5),
        recompute_s=cost(0.5),
        transfer_s=cost(0.5, 0.4),
        launch_s=cost(0.5, 0.4),
        device_s=cost(5.0, 0.3),
        attend_s=cost(0.05, 0.3),
        host_attend_s=cost(1.0),
        host_fixed_s=cost(2.0, 0.4),
        disk_kv_s=cost(3.0, 0.02),
        disk_activation_s=cost(1.5),
        head_s=cost(5.0, 0.5),
        tail_s=cost(5.0, 0.5),
    )


def of_machine(
    *, hidden: int, kv_dim: int, element_bytes: int, link_bytes_s: float, flops_s: float, batch: int = 1
) -> LayerPrices:
    """The paper's form: by v_com and v_gpu alone, `l` counting tokens of each of `batch` equal sequences."""
    return LayerPrices(
        kv_s=2 * batch * kv_dim * element_bytes / link_bytes_s,
        activation_s=batch * hidden * element_bytes / link_bytes_s,
        recompute_s=4 * batch * hidden * kv_dim / flops_s,
    )


def group(costs: LayerPrices, tokens: int, **counts: Any) -> GroupPrices:
    """A group of which all tokens have activations and may be left to the host, unless `counts` say otherwise."""
    return GroupPrices(costs, tokens, **{"inputs": tokens, "host": tokens, **counts})


def some_kept(generator: random.Random, *, host: bool = False) -> dict[str, float]:
    """What compression has kept beside them, if anything; some of it on disk, or, if `host`, all left to the host."""
    kept = generator.choice([0, 0, generator.randrange(0, 100)])
    if host and kept and generator.random() < 0.5:
        return {"kept": kept, "kept_on_host": True}
    return {"kept": kept, "kept_on_disk": generator.choice([0, generator.randrange(0, kept + 1)])}


@pytest.mark.parametrize("seed", range(3))
def test_split_point_equals_brute_force(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(INSTANCES):
        costs, tokens = random_costs(generator), generator.randrange(0, 200)
        inputs = generator.choice([tokens, generator.randrange(0, tokens + 1)])
        given = group(costs, tokens, inputs=inputs, **some_kept(generator))
        found = KVPR().split(given)
        assert (found is None) == (given.inputs == 0)
        if found is not None:
            times = [float(split_seconds(given, split)) for split in range(given.inputs + 1)]
            assert 0 <= found.recomputed <= given.inputs
            assert times[found.recomputed] == pytest.approx(min(times), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_division_equals_brute_force(seed: int) -> None:
    generator = random.Random(200 + seed)
    for _ in range(60):
        costs, tokens = random_costs(generator), generator.randrange(0, 40)
        chunk = generator.choice([1, 3, 8, 100])
        resident = generator.choice([0, 0, generator.randrange(0, 45)])
        recompute, host = generator.random() < 0.8, generator.choice([0, 1000, 1000, generator.randrange(0, 45)])
        most = generator.choice([None, generator.randrange(0, 45)])
        kept = min(resident, tokens)
        limit = min(tokens - kept, tokens if most is None else most) if recompute else 0
        given = group(
            costs, tokens, inputs=limit, host=host, resident=kept, chunk=chunk, **some_kept(generator, host=True)
        )
        found = steady_split(given, recompute=recompute, host=True)
        times = [
            float(given.steady_seconds(split, a))
            for a in range(min(host, tokens - kept) + 1)
            for split in range(max(0, limit - a) + 1)
        ]
        assert found.resident == kept and found.streamed >= 0
        assert found.on_host <= host and found.recomputed <= max(0, limit - found.on_host)
        assert given.steady_seconds(found.recomputed, found.on_host) == pytest.approx(min(times), rel=1e-9)


def test_streaming_is_never_beaten_by_the_choice() -> None:
    generator = random.Random(8)
    for _ in range(INSTANCES):
        costs, tokens = random_costs(generator), generator.randrange(1, 5000)
        given = group(costs, tokens)
        found = steady_split(given, recompute=True, host=True)
        assert given.steady_seconds(found.recomputed, found.on_host) <= given.steady_seconds(0) * (1 + 1e-9)


def test_bounds_of_the_paper_and_of_chunks() -> None:
    # h = kv_dim, and recomputation as fast as the activations come: Llama-2-7B on the paper's kind of machine.
    costs = of_machine(hidden=4096, kv_dim=4096, element_bytes=2, link_bytes_s=32e9, flops_s=2.62144e14)
    given = group(costs, 4096, chunk=32)
    plain, whole, chunked = split_seconds(given, 0), KVPR().split(given), Chunked().split(given)
    assert costs.recompute_s == pytest.approx(costs.activation_s) and whole is not None and chunked is not None
    assert plain / split_seconds(given, whole.recomputed) == pytest.approx(1.5, rel=1e-3)
    assert plain / given.steady_seconds(chunked.recomputed) == pytest.approx(2.0, rel=0.02)


def test_grouped_queries_are_streamed() -> None:
    # Llama-3-8B: the activations of a token are twice its keys and values.
    costs = of_machine(hidden=4096, kv_dim=1024, element_bytes=2, link_bytes_s=50e9, flops_s=1e15)
    for tokens in (1, 77, 32768):
        for method in (KVPR(), Chunked()):
            found = method.split(group(costs, tokens, host=0, chunk=512))
            assert found is not None and found.recomputed == 0


def best(costs: LayerPrices, tokens: int) -> tuple[int, float]:
    """KVPR's split point, and its seconds."""
    given = group(costs, tokens)
    found = KVPR().split(given)
    assert found is not None
    return found.recomputed, float(split_seconds(given, found.recomputed))


def test_split_point_grows_with_the_sequence() -> None:
    costs = of_machine(hidden=4096, kv_dim=4096, element_bytes=2, link_bytes_s=32e9, flops_s=1.5e14, batch=64)
    points = [best(costs, tokens)[0] for tokens in range(128, 256)]
    assert points == sorted(points) and points[-1] > points[0]
    assert math.isclose(points[-1] / 255, points[0] / 128, rel_tol=0.02)


def test_column_schedule_shares_the_weights() -> None:
    base = of_machine(hidden=512, kv_dim=512, element_bytes=2, link_bytes_s=1e9, flops_s=1e12)
    weights_s = 12 * 512 * 512 * 2 / 1e9
    row = base.with_weights(WeightTimes(weights_s / 6, weights_s * 5 / 6), 1)
    coarse = base.with_weights(WeightTimes(weights_s, 0.0), 1)
    assert best(row, 300)[1] <= best(coarse, 300)[1]
    weights = WeightTimes(weights_s / 6, weights_s * 5 / 6)
    times = [best(base.with_weights(weights, groups), 300)[1] for groups in (2, 8, 999)]
    assert times == sorted(times, reverse=True) and times[0] <= best(coarse, 300)[1]
    assert times[-1] == pytest.approx(best(base, 300)[1], rel=0.05)


def test_equal_times_recompute_nothing() -> None:
    assert best(LayerPrices(kv_s=1.0, activation_s=1.0, recompute_s=0.0), 50) == (0, 50.0)


@pytest.mark.parametrize("seed", range(5))
def test_spread_is_even_and_exact(seed: int) -> None:
    generator = random.Random(seed)
    limits = [generator.randrange(0, 50) for _ in range(generator.randrange(1, 9))]
    total = generator.randrange(0, sum(limits) + 1)
    shares = spread(total, limits)
    assert sum(shares) == total and all(0 <= share <= limit for share, limit in zip(shares, limits, strict=True))
    open_shares = [share for share, limit in zip(shares, limits, strict=True) if share < limit]
    assert not open_shares or max(shares) - min(open_shares) <= 1


def every_division(costs: LayerPrices, tokens: int, chunk: int, resident: int, most: int, host: int) -> float:
    """The shortest time over every split point and every number of tokens on the host, all at once."""
    split, away = np.meshgrid(np.arange(tokens + 1), np.arange(min(host, tokens - resident) + 1))
    rest = tokens - resident - away
    chunks, left = -(-split // chunk), rest - split
    sent = costs.head_s + costs.tail_s + (chunks + (left > 0)) * costs.transfer_s
    sent = sent + costs.activation_s * split + costs.kv_s * left
    hosted = (away > 0) * (costs.host_fixed_s + costs.host_attend_s * away)
    attended = np.maximum(hosted, costs.attend_s * (tokens - away))
    busy = costs.device_s + chunks * costs.launch_s + costs.recompute_s * split + attended
    allowed = split <= np.maximum(0, np.minimum(most, tokens - resident) - away)
    return float(np.where(allowed, np.maximum(sent, busy), np.inf).min())


@pytest.mark.parametrize("seed", range(3))
def test_long_sequences_equal_brute_force(seed: int) -> None:
    generator = random.Random(300 + seed)
    for _ in range(10):
        costs, tokens = random_costs(generator), generator.randrange(100, 700)
        chunk = generator.choice([1, 16, 64, 250, 5000])
        resident, host = generator.choice([0, generator.randrange(100)]), generator.randrange(1, 800)
        most = generator.choice([tokens, generator.randrange(tokens)])
        given = group(costs, tokens, inputs=most, host=host, resident=resident, chunk=chunk)
        found = steady_split(given, recompute=True, host=True)
        expected = every_division(costs, tokens, chunk, resident, most, host)
        assert given.steady_seconds(found.recomputed, found.on_host) == pytest.approx(expected, rel=1e-9)


def test_a_step_of_a_long_sequence_is_divided_at_once() -> None:
    costs = LayerPrices(
        1.3e-7, 0.7e-7, 0.4e-7, transfer_s=1e-5, launch_s=2e-5, device_s=1e-3, host_attend_s=6e-8, host_fixed_s=1e-4
    )
    for tokens in range(131072, 131092):
        # Where the host may attend to some alone: else the better of recomputing and the host's attention does it all.
        given = group(costs, tokens, host=tokens // 8)
        found = All().split(given)
        assert found is not None and found.recomputed and found.on_host and found.streamed
        # However long the sequence is.
        assert count_calls(partial(All().split, given)) < 1000
