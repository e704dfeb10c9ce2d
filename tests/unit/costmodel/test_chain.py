"""The predicted chain against its limits, and against what a person would work out."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megakv.base.partition import even
from megakv.costmodel.chain import Chain, ChainPrediction
from megakv.costmodel.curves import Curve
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import LayerShape, ModelShape
from megakv.runahead.chain_search import best_partition
from tests.unit.costmodel.profiles import ideal, without_links

HEADS = 8
PAIR_S = 1e-9


def attention_only(layers: int, *, dense: int = 0, window: int | None = None) -> ModelShape:
    """A model whose time outside attention is that of `dense` weights."""
    shapes = (LayerShape(dense, window=window),) * layers
    return ModelShape(64, 0, 1, HEADS, HEADS, 64, 64, shapes, 0, torch.float32)


def chain_seconds(
    profile: HardwareProfile, model: ModelShape, partition: Sequence[int], **options: Any
) -> ChainPrediction:
    """The timeline of one sequence's chain."""
    return Chain(profile, model, **options).predict((partition,), (0,))


def pairs_s(rows: int, prefix: int) -> float:
    return HEADS * PAIR_S * (rows * prefix + rows * rows / 2)


def row_s(keys: float) -> float:
    """Of the last layer, the last token alone."""
    return HEADS * PAIR_S * keys


def random_machine() -> HardwareProfile:
    return ideal(
        seconds_per_pair=10 ** random.uniform(-11, -8),
        exchange=Curve.affine(10 ** random.uniform(-6, -3), 10 ** random.uniform(7, 10)),
        exposed=(random.random(), random.random()),
        matmul=Curve(sizes=(1, 101), seconds=(1e-10, 10 ** random.uniform(-10, -8))),
        merge=Curve.affine(1e-6, 10 ** random.uniform(8, 10)),
        step_overhead_s={"pass_kv": 10 ** random.uniform(-6, -3)},
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_on_one_rank_is_one_rank(size: int) -> None:
    tokens, layers = random.randint(500, 3000), random.randint(1, 6)
    model = attention_only(layers, dense=100_000)
    profile = ideal(seconds_per_pair=PAIR_S, matmul=Curve(sizes=(1, 101), seconds=(1e-9, 2e-9)))
    times = TokenTimes(profile, model)
    dense = layers * times.layer(0, tokens)
    saved = times.layer(0, tokens) - times.layer(layers - 1, tokens, wanted=1)
    expected = (layers - 1) * pairs_s(tokens, 0) + row_s(tokens) + dense - saved + times.head(1)
    for rank in range(size):
        partition = tuple(tokens if index == rank else 0 for index in range(size))
        assert chain_seconds(profile, model, partition).seconds == pytest.approx(expected, rel=2e-3)


def test_links_that_take_no_time_leave_the_longest_rank() -> None:
    """A later rank starts its layer with the others, and its prefix is there by then."""
    layers = 4
    for partition in ((700, 400, 300), (500, 500, 500), (100, 100, 1000)):
        prefix = np.cumsum((0, *partition[:-1])).tolist()
        slowest = max(pairs_s(rows, before) for rows, before in zip(partition, prefix, strict=True))
        profile = without_links(ideal(seconds_per_pair=PAIR_S))
        seconds = chain_seconds(profile, attention_only(layers), partition).seconds
        assert seconds == pytest.approx((layers - 1) * slowest, rel=5e-3)


def test_a_long_first_rank_is_waited_for() -> None:
    """Rank 0 holds nearly all: rank 1 gets a layer's prefix when rank 0 begins that layer."""
    layers, rows = 5, (2000, 10)
    profile = without_links(ideal(seconds_per_pair=PAIR_S))
    found = chain_seconds(profile, attention_only(layers), rows)
    first = pairs_s(rows[0], 0)
    # In the last layer, all ranks meet.
    assert found.ends_s[0, -2] == pytest.approx((layers - 1) * first, rel=1e-3)
    assert found.ends_s[1, -2] == pytest.approx((layers - 2) * first + pairs_s(rows[1], rows[0]), rel=1e-2)
    assert found.ends_s[:, -1] == pytest.approx(np.full(2, found.ends_s[0, -2] + row_s(rows[0])), rel=1e-6)
    assert found.waited_s[1, 1:-1].min() > 0.9 * (first - pairs_s(rows[1], rows[0]))


def visits_s(model: ModelShape, size: int, link: Curve) -> float:
    """A query goes round all ranks."""
    return (size - 1) * link.at(model.attention().query_row_bytes * 1)


def test_links_alone() -> None:
    """With work that takes no time the last link carries all prefixes of all layers but the last, one by one."""
    rows, layers = 300, 6
    model = attention_only(layers)
    link = Curve.affine(0.0, 1e6)
    message = model.attention().kv_row_bytes * rows / 1e6
    for size in (2, 3, 4):
        seconds = chain_seconds(ideal(seconds_per_pair=1e-18, exchange=link), model, (rows,) * size).seconds
        assert seconds == pytest.approx((layers - 1) * (size - 1) * message + visits_s(model, size, link), rel=1e-3)


def test_chunks_pipeline_hops() -> None:
    """A prefix of many chunks reaches the last rank one hop later than the first, but for a chunk per hop."""
    model, link = attention_only(2), Curve.affine(0.0, 1e6)
    rows, hops = 800, 3
    whole = model.attention().kv_row_bytes * rows / 1e6
    profile = ideal(seconds_per_pair=1e-18, exchange=link)
    partition = (rows, 0, 0, 1)
    stored, forwarded = (
        chain_seconds(profile, model, partition, chunk_tokens=chunk).seconds - visits_s(model, 4, link)
        for chunk in (rows, rows // 8)
    )
    assert stored == pytest.approx(hops * whole, rel=1e-2)
    assert forwarded == pytest.approx(whole * (1 + (hops - 1) / 8), rel=1e-2)


def test_ranks_behind_the_prompt_get_nothing() -> None:
    """Unless the last rank keeps all keys and values."""
    model, link = attention_only(3), Curve.affine(10.0, 1e6)
    profile = ideal(seconds_per_pair=PAIR_S, exchange=link)
    assert chain_seconds(profile, model, (900, 0, 0)).seconds < 1
    assert chain_seconds(profile, model, (900, 0, 0), kv="last").seconds > 20
    assert chain_seconds(profile, model, (0, 0, 900), kv="last").seconds < 1


def test_slower_machines_are_slower() -> None:
    """Always where a link takes nothing from the processor, and for links and weights also where it does."""
    shifted = 0
    for _ in range(60):
        profile = random_machine()
        size, tokens = random.randint(2, 6), random.randint(50, 9000)
        cuts = sorted(random.choices(range(tokens + 1), k=size - 1))
        partition = tuple(np.diff([0, *cuts, tokens]).tolist())
        model = attention_only(random.randint(1, 4), dense=random.choice((0, 50_000)))
        apart = profile.model_copy(update={"exposed_transfer": 0.0, "exposed_compute": 0.0})
        for machine in (profile, apart):
            seconds = chain_seconds(machine, model, partition).seconds
            assert 0 < seconds < float("inf")
            for name in ("exchange", "matmul", "merge"):
                worse = chain_seconds(doubled(machine, name), model, partition).seconds
                if machine is profile and name == "merge":
                    # What a link takes from the processor is spread over all work: more of it elsewhere shifts it.
                    shifted += worse < seconds * (1 - 1e-2)
                else:
                    assert worse >= seconds * (1 - 1e-9), name
    # By more than a hundredth in one of 1,300 machines.
    assert shifted <= 3


def doubled(profile: HardwareProfile, name: str) -> HardwareProfile:
    """A machine that takes twice as long for something."""
    curve = getattr(profile, name)
    slower = curve.model_copy(update={"seconds": tuple(2 * s for s in curve.seconds)})
    return profile.model_copy(update={name: slower})


def test_more_tokens_take_longer() -> None:
    for _ in range(30):
        profile, model = random_machine(), attention_only(3, dense=20_000)
        tokens, size = random.randint(64, 4000), random.randint(2, 5)
        times = [chain_seconds(profile, model, even(tokens * scale, size)).seconds for scale in (1, 2, 4)]
        assert times == sorted(times)


def test_timeline_is_that_of_the_slowest() -> None:
    profile, model = random_machine(), attention_only(4, dense=20_000)
    found = chain_seconds(profile, model, (900, 500, 300, 200))
    assert found.ends_s.shape == found.waited_s.shape == (4, 4)
    assert (np.diff(found.ends_s, axis=1) > 0).all()
    assert (found.waited_s >= -1e-12).all() and np.allclose(found.waited_s[0, :-1], 0.0, atol=1e-12)
    assert found.busy_s == pytest.approx((found.ends_s[:, -1] - found.waited_s.sum(axis=1)).tolist())
    assert found.seconds == pytest.approx(found.ends_s[:, -1].max(), rel=1e-3)


def test_the_last_layer_attends_for_the_last_token() -> None:
    """Where the last rank keeps all keys and values, they go down the chain in this layer too."""
    rows, link = (900, 500, 300), Curve.affine(0.0, 1e5)
    model = attention_only(2)
    profile = ideal(seconds_per_pair=1e-15, exchange=link)
    message = model.attention().kv_row_bytes / 1e5
    layers = chain_seconds(profile, model, rows, kv="last", chunk_tokens=10_000).seconds / message
    # Of 900 and 500 tokens to the last rank, in both layers, and 900 to the one before it first or in between.
    assert 2 * 1400 < layers < 2 * 1400 + 900 + 2 * 900
    sharded = chain_seconds(profile, model, rows, chunk_tokens=10_000).seconds / message
    assert 1400 < sharded < 1400 + 900 + 2
    free = without_links(ideal(seconds_per_pair=PAIR_S))
    found = chain_seconds(free, model, rows, kv="last")
    spent = found.ends_s[:, 1] - found.ends_s[:, 0] - found.waited_s[:, 1]
    assert spent == pytest.approx([0.0, 0.0, row_s(sum(rows))], rel=0.01, abs=1e-7)


def test_a_batch_is_one_chain() -> None:
    """Two sequences at once: their work adds up, and their messages travel together."""
    link = Curve.affine(1e-3, 1e9)
    profile = ideal(seconds_per_pair=PAIR_S, exchange=link)
    chain = Chain(profile, attention_only(2))
    one = chain.predict(((600, 300),), (0,)).seconds
    two = chain.predict(((600, 300), (600, 300)), (0, 0)).seconds
    assert one < two < 2 * one
    ragged = chain.predict(((600, 300), (0, 1)), (0, 0)).seconds
    assert one <= ragged < 1.01 * one + 1e-3


def test_windows_bound_the_prefix() -> None:
    profile = without_links(ideal(seconds_per_pair=PAIR_S))
    wide, narrow = (chain_seconds(profile, attention_only(2, window=w), (4000,) * 4).seconds for w in (None, 512))
    assert narrow < 0.25 * wide
    unlimited = chain_seconds(profile, attention_only(2, window=16_000), (4000,) * 4).seconds
    assert unlimited == pytest.approx(wide, rel=1e-6)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("size", "tokens"), [(2, 60), (3, 30), (4, 13)])
def test_best_partition_is_as_good_as_any(size: int, tokens: int) -> None:
    """Exhaustively: all partitions of few tokens, ranks without any included.

    At least 4 of 6 machines' are within 1% of the best, and all within 10%.
    """
    cuts = itertools.combinations_with_replacement(range(tokens + 1), size - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *cut, tokens))) for cut in cuts]
    excess = []
    for _ in range(6):
        pair_s = 10 ** random.uniform(-6, -3)
        # From links that are not worth using to such as are never waited for.
        link = Curve.affine(0.0, 10 ** random.uniform(0, 3.5) / pair_s)
        profile, model = ideal(seconds_per_pair=pair_s, exchange=link, exposed=(0.2, 0.2)), attention_only(3)
        fastest = min(chain_seconds(profile, model, partition).seconds for partition in every)
        chosen = best_partition(profile, model, tokens, size)
        assert sum(chosen) == tokens and len(chosen) == size
        excess.append(chain_seconds(profile, model, chosen).seconds / fastest - 1)
    assert sorted(excess)[3] <= 0.01 and max(excess) <= 0.1, excess


def test_best_partition_evens_out_the_work() -> None:
    """With free links, all ranks end together; earlier ranks take more tokens."""
    profile, model = without_links(ideal(seconds_per_pair=PAIR_S)), attention_only(8)
    for size, tokens in ((2, 16_384), (4, 8192), (8, 32_768)):
        chosen = best_partition(profile, model, tokens, size)
        assert list(chosen) == sorted(chosen, reverse=True)
        balanced = 7 * pairs_s(tokens, 0) / size
        assert chain_seconds(profile, model, chosen).seconds == pytest.approx(balanced, rel=0.03)


def test_slow_links_are_left_out() -> None:
    profile = ideal(seconds_per_pair=PAIR_S, exchange=Curve.affine(1.0, 1e6))
    assert best_partition(profile, attention_only(4), 2048, 4) == (0, 0, 0, 2048)
