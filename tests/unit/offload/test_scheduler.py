"""The scheduler finds what trying every integer finds, on random machines."""

import math
import random
import time

import numpy as np
import pytest

from megakv.costmodel.offload import LayerCosts, chunked_seconds, split_seconds, steady_seconds
from megakv.offload.division import spread
from megakv.offload.scheduler import chunked_split_point, divide, split_point

INSTANCES = 300


def random_costs(generator: random.Random) -> LayerCosts:
    """A machine of any kind: links, processors and latencies over several orders of magnitude, some of them free."""

    def cost(scale: float, free: float = 0.15) -> float:
        return 0.0 if generator.random() < free else scale * 10 ** generator.uniform(-1.5, 1.5)

    return LayerCosts(
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


@pytest.mark.parametrize("seed", range(3))
def test_split_point_equals_brute_force(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(INSTANCES):
        costs, tokens = random_costs(generator), generator.randrange(0, 200)
        most = generator.choice([None, generator.randrange(0, 220)])
        found = split_point(costs, tokens, most=most)
        limit = tokens if most is None else min(most, tokens)
        times = [split_seconds(costs, tokens, split) for split in range(limit + 1)]
        assert 0 <= found.recomputed <= limit
        assert found.seconds == pytest.approx(times[found.recomputed], rel=1e-12)
        assert found.seconds == pytest.approx(min(times), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_chunked_split_point_equals_brute_force(seed: int) -> None:
    generator = random.Random(100 + seed)
    for _ in range(INSTANCES):
        costs, tokens = random_costs(generator), generator.randrange(0, 150)
        chunk = generator.choice([1, 2, 7, 16, 64, 1000])
        most = generator.choice([None, generator.randrange(0, 170)])
        found = chunked_split_point(costs, tokens, chunk=chunk, most=most)
        limit = tokens if most is None else min(most, tokens)
        times = [chunked_seconds(costs, tokens, split, chunk) for split in range(limit + 1)]
        assert found.seconds == pytest.approx(times[found.recomputed], rel=1e-12)
        assert found.seconds == pytest.approx(min(times), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_division_equals_brute_force(seed: int) -> None:
    generator = random.Random(200 + seed)
    for _ in range(60):
        costs, tokens = random_costs(generator), generator.randrange(0, 40)
        chunk = generator.choice([1, 3, 8, 100])
        resident = generator.choice([0, 0, generator.randrange(0, 45)])
        recompute, host = generator.random() < 0.8, generator.choice([0, 1000, 1000, generator.randrange(0, 45)])
        most = generator.choice([None, generator.randrange(0, 45)])
        found = divide(costs, tokens, chunk=chunk, resident=resident, recompute=recompute, host=host, most=most)
        kept = min(resident, tokens)
        limit = min(tokens - kept, tokens if most is None else most) if recompute else 0
        times = [
            steady_seconds(costs, tokens, split, resident=kept, on_host=a, chunk=chunk)
            for a in range(min(host, tokens - kept) + 1)
            for split in range(max(0, limit - a) + 1)
        ]
        assert found.resident == kept and found.streamed >= 0
        assert found.on_host <= host and found.recomputed <= max(0, limit - found.on_host)
        at_found = steady_seconds(costs, tokens, found.recomputed, resident=kept, on_host=found.on_host, chunk=chunk)
        assert found.seconds == pytest.approx(at_found, rel=1e-12)
        assert found.seconds == pytest.approx(min(times), rel=1e-9)


def test_chunk_times_equal_a_simulation() -> None:
    generator = random.Random(7)
    for _ in range(INSTANCES):
        costs, tokens = random_costs(generator), generator.randrange(1, 100)
        recomputed, chunk = generator.randrange(0, tokens + 1), generator.randrange(1, 40)
        link, device = costs.head_s, 0.0
        for start in range(0, recomputed, chunk):
            size = min(chunk, recomputed - start)
            link += costs.transfer_s + costs.activation_s * size
            device = max(device, link) + costs.launch_s + costs.recompute_s * size
        link += costs.tail_s + (recomputed < tokens) * costs.transfer_s + costs.kv_s * (tokens - recomputed)
        assert chunked_seconds(costs, tokens, recomputed, chunk) == pytest.approx(max(link, device), rel=1e-9)


def test_streaming_is_never_beaten_by_the_choice() -> None:
    generator = random.Random(8)
    for _ in range(INSTANCES):
        costs, tokens = random_costs(generator), generator.randrange(1, 5000)
        plain = steady_seconds(costs, tokens, 0, chunk=256)
        assert divide(costs, tokens, chunk=256, host=tokens).seconds <= plain * (1 + 1e-9)


def test_bounds_of_the_paper_and_of_chunks() -> None:
    # h = kv_dim, and recomputation as fast as the activations come: Llama-2-7B on the paper's kind of machine.
    costs = LayerCosts.of_machine(hidden=4096, kv_dim=4096, element_bytes=2, link_bytes_s=32e9, flops_s=2.62144e14)
    tokens = 4096
    plain = split_seconds(costs, tokens, 0)
    assert costs.recompute_s == pytest.approx(costs.activation_s)
    assert plain / split_point(costs, tokens).seconds == pytest.approx(1.5, rel=1e-3)
    assert plain / chunked_split_point(costs, tokens, chunk=32).seconds == pytest.approx(2.0, rel=0.02)


def test_grouped_queries_are_streamed() -> None:
    # Llama-3-8B: the activations of a token are twice its keys and values.
    costs = LayerCosts.of_machine(hidden=4096, kv_dim=1024, element_bytes=2, link_bytes_s=50e9, flops_s=1e15)
    for tokens in (1, 77, 32768):
        assert split_point(costs, tokens).recomputed == 0
        assert chunked_split_point(costs, tokens, chunk=512).recomputed == 0
        assert divide(costs, tokens, chunk=512).recomputed == 0


def test_split_point_grows_with_the_sequence() -> None:
    costs = LayerCosts.of_machine(
        hidden=4096, kv_dim=4096, element_bytes=2, link_bytes_s=32e9, flops_s=1.5e14, batch=64
    )
    points = [split_point(costs, tokens).recomputed for tokens in range(128, 256)]
    assert points == sorted(points) and points[-1] > points[0]
    assert math.isclose(points[-1] / 255, points[0] / 128, rel_tol=0.02)


def test_column_schedule_shares_the_weights() -> None:
    base = LayerCosts.of_machine(hidden=512, kv_dim=512, element_bytes=2, link_bytes_s=1e9, flops_s=1e12)
    weights_s = 12 * 512 * 512 * 2 / 1e9
    row = base.with_offloaded_weights(kv_weights_s=weights_s / 6, other_weights_s=weights_s * 5 / 6)
    coarse = base.with_offloaded_weights(kv_weights_s=weights_s / 6, other_weights_s=weights_s * 5 / 6, fine=False)
    assert split_point(row, 300).seconds <= split_point(coarse, 300).seconds
    times = [split_point(base.in_column(weights_s=weights_s, num_gpu_batches=k), 300).seconds for k in (1, 2, 8, 999)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(split_point(base, 300).seconds, rel=0.05)


def test_equal_times_recompute_nothing() -> None:
    division = split_point(LayerCosts(kv_s=1.0, activation_s=1.0, recompute_s=0.0), 50)
    assert division.recomputed == 0 and division.seconds == 50.0


@pytest.mark.parametrize("seed", range(5))
def test_spread_is_even_and_exact(seed: int) -> None:
    generator = random.Random(seed)
    limits = [generator.randrange(0, 50) for _ in range(generator.randrange(1, 9))]
    total = generator.randrange(0, sum(limits) + 1)
    shares = spread(total, limits)
    assert sum(shares) == total and all(0 <= share <= limit for share, limit in zip(shares, limits, strict=True))
    open_shares = [share for share, limit in zip(shares, limits, strict=True) if share < limit]
    assert not open_shares or max(shares) - min(open_shares) <= 1


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 cached tokens"):
        split_point(LayerCosts(1.0, 1.0, 1.0), -1)


def every_division(costs: LayerCosts, tokens: int, chunk: int, resident: int, most: int, host: int) -> float:
    """The shortest time over every split point and every number of tokens on the host, all at once."""
    split, away = np.meshgrid(np.arange(tokens + 1), np.arange(min(host, tokens - resident) + 1))
    rest = tokens - resident - away
    chunks, left = -(-split // chunk), rest - split
    sent = costs.head_s + costs.tail_s + (chunks + (left > 0)) * costs.transfer_s
    sent = sent + costs.activation_s * split + costs.kv_s * left
    busy = costs.device_s + chunks * costs.launch_s + costs.recompute_s * split + costs.attend_s * (tokens - away)
    hosted = (away > 0) * (costs.device_s + costs.host_fixed_s + costs.host_attend_s * away)
    allowed = split <= np.maximum(0, np.minimum(most, tokens - resident) - away)
    return float(np.where(allowed, np.maximum(np.maximum(sent, busy), hosted), np.inf).min())


@pytest.mark.parametrize("seed", range(3))
def test_long_sequences_equal_brute_force(seed: int) -> None:
    generator = random.Random(300 + seed)
    for _ in range(10):
        costs, tokens = random_costs(generator), generator.randrange(100, 700)
        chunk = generator.choice([1, 16, 64, 250, 5000])
        resident, host = generator.choice([0, generator.randrange(100)]), generator.randrange(1, 800)
        most = generator.choice([tokens, generator.randrange(tokens)])
        found = divide(costs, tokens, chunk=chunk, resident=resident, host=host, most=most)
        assert found.seconds == pytest.approx(every_division(costs, tokens, chunk, resident, most, host), rel=1e-9)


def test_a_step_of_a_long_sequence_is_divided_at_once() -> None:
    costs = LayerCosts(
        1.3e-7, 0.7e-7, 0.4e-7, transfer_s=1e-5, launch_s=2e-5, device_s=1e-3, host_attend_s=6e-8, host_fixed_s=1e-4
    )
    took = []
    for tokens in range(131072, 131092):
        begun = time.thread_time()
        found = divide(costs, tokens, chunk=256, host=tokens, most=tokens)
        took.append(time.thread_time() - begun)
        assert found.recomputed and found.on_host and found.streamed
    assert min(took) < 1e-3
