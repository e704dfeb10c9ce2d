"""Whole-model predictions: what a person would add up, and what methods gain on each other."""

import random
from dataclasses import replace

import pytest

from megakv.base.partition import even
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload, dense_bound
from megakv.costmodel.curves import Curve
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.prefill import PrefillTimes, alone
from tests.unit.costmodel.profiles import ideal
from tests.unit.costmodel.test_chain import HEADS, PAIR_S, attention_only, pairs_s, row_s


def times(new: int, size: int, *, layers: int = 4, dense: int = 0, cached: int = 0, **machine: object) -> PrefillTimes:
    profile = ideal(seconds_per_pair=PAIR_S, **machine)  # type: ignore[arg-type]
    return PrefillTimes(profile, attention_only(layers, dense=dense), Workload((new,), (cached,), size))


def test_single_is_all_pairs() -> None:
    assert times(4000, 4).seconds("single") == pytest.approx(3 * pairs_s(4000, 0) + row_s(4000), rel=1e-3)
    assert alone(Workload((30, 5), (0, 0), 3)) == ((0, 0, 30), (0, 0, 5))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tsp_computes_the_square(size: int) -> None:
    """The paper's form computes all C^2 scores over p ranks, runahead's even chain the staircase of the last rank."""
    tokens = 1024 * size
    predicted = times(tokens, size)
    square = 3 * HEADS * PAIR_S * tokens**2 / size
    last = row_s(tokens)
    assert predicted.seconds("tsp") == pytest.approx(square + last, rel=1e-3)
    skipped = 3 * pairs_s(1024, tokens - 1024)
    assert predicted.seconds("tsp_causal") == pytest.approx(skipped + last, rel=1e-3)
    # Keys and values of the last layer stay where they are: its query sees them on all ranks at once.
    assert predicted.seconds("runahead", (even(tokens, size),)) == pytest.approx(skipped + last / size, rel=1e-3)
    # Balanced over ranks the triangle is half of the square; the bound is of dense rectangles over the triangle.
    assert predicted.seconds("pass_kv") == pytest.approx(square / 2 + last / size, rel=1e-3)
    assert predicted.seconds("pass_kv") < dense_bound(2 * predicted.seconds("single"), size)


def test_tsp_waits_for_its_all_gather() -> None:
    link = Curve.affine(0.0, 1e9)
    free, slow = times(2048, 4).seconds("tsp"), times(2048, 4, collective=link).seconds("tsp")
    gathered = 3 * attention_only(1).attention().kv_row_bytes * 512 / 1e9
    # In the last layer too, whatever it computes.
    assert slow - free == pytest.approx(4 * gathered, rel=1e-3)


def test_layers_add_up() -> None:
    matmul = Curve(sizes=(1, 101), seconds=(1e-9, 2e-9))
    machine = {"matmul": matmul, "exchange": Curve.affine(1e-4, 1e9), "collective": Curve.affine(1e-4, 1e9)}
    profile = ideal(seconds_per_pair=PAIR_S, **machine)  # type: ignore[arg-type]
    work, model = Workload((3000,), (1000,), 3), attention_only(5, dense=200_000)
    predicted = PrefillTimes(profile, model, work)
    for method in ("pass_kv", "pass_q", "all_gather"):
        tokens = TokenTimes(profile, model)
        dense = 4 * tokens.layer(0, 1000) + tokens.layer(4, 1000, wanted=1) + tokens.head(1)
        layer = LayerTimes(profile, model.attention(), work)
        attention = 4 * layer.predict(method).seconds + layer.predict_last(method).seconds
        assert predicted.seconds(method) == pytest.approx(attention + dense)


def test_the_last_rank_is_late_by_what_it_reads() -> None:
    """However many tokens a pass has; not one rank alone."""
    matmul, lag = Curve(sizes=(1, 101), seconds=(1e-9, 101e-9)), random.uniform(0.1, 1)
    late, ready = (
        PrefillTimes(ideal(matmul=matmul, lag=each), attention_only(5, dense=200_000), Workload((3000,), (0,), 3))
        for each in (lag, 0.0)
    )
    partitions = (even(3000, 3),)
    for method in ("pass_kv", "pass_q", "runahead"):
        more = late.seconds(method, partitions) - ready.seconds(method, partitions)
        assert more == pytest.approx(lag * 1e-3, rel=1e-2)
        assert sum(late.terms(method, partitions).values()) == pytest.approx(late.seconds(method, partitions))
    assert late.seconds("single") == ready.seconds("single")


def test_last_layer_computes_wanted_tokens() -> None:
    """Keys and values of all, all else of one."""
    matmul = Curve(sizes=(1, 101), seconds=(1e-9, 101e-9))
    tokens = TokenTimes(ideal(matmul=matmul), attention_only(2, dense=1_000_000))
    projections = 64 * HEADS * 64 * 4
    assert tokens.layer(0, 500) == pytest.approx(1e-9 * 500 * 1_000_000)
    wanted = 1e-9 * (500 * projections / 2 + 1_000_000 - projections / 2)
    assert tokens.layer(1, 500, wanted=1) == pytest.approx(wanted)
    assert tokens.layer(0, 500, wanted=1) == tokens.layer(0, 500)
    assert tokens.before(0, 500) == pytest.approx(1e-9 * 500 * projections * 3 / 4)


def test_a_last_layer_that_one_token_is_wanted_of() -> None:
    """Its query goes round like a decoded token's; what gathers keys and values still does."""
    link = Curve.affine(1e-4, 1e9)
    profile, shape = ideal(seconds_per_pair=PAIR_S, exchange=link, collective=link), attention_only(1).attention()
    layer = LayerTimes(profile, shape, Workload((3000, 0, 500), (100, 70, 0), 4))
    decoding = LayerTimes(profile, shape, Workload((1, 0, 1), (3099, 70, 499), 4)).predict("pass_q").seconds
    assert layer.predict_last("pass_kv").seconds == layer.predict_last("pass_q").seconds == decoding
    for method in ("all_gather", "tsp", "tsp_causal"):
        terms = layer.predict_last(method).terms
        assert terms["collective"] == layer.predict(method).terms["collective"] > 0
        assert terms["attention"] == pytest.approx(row_s(3600))
    alone = LayerTimes(profile, shape, Workload((3000,), (100,), 1))
    assert alone.predict_last("pass_kv").seconds == pytest.approx(row_s(3100), rel=1e-3)


def test_results_of_a_large_layer_are_written_to_new_pages() -> None:
    """From a million bytes on that a layer holds, the C library keeps nothing for reuse."""
    fresh = Curve(sizes=(1.0, 1e6, 2e6), seconds=(1e-15, 2e-15, 1.0))
    tokens = TokenTimes(ideal(copy_fresh=fresh), attention_only(2))
    # A layer of this model holds three tensors of 64 wide; queries, keys and values are 1,536 wide.
    small, large = int(0.999e6 / (3 * 64 * 4)), int(2e6 / (3 * 64 * 4))
    assert tokens.before(0, small) < 1e-6
    assert tokens.before(0, large) == pytest.approx(1536 / (3 * 64), rel=1e-2)
    assert tokens.after(0, large) == pytest.approx(2 * 64 / (3 * 64), rel=1e-2)
    # What the last layer leaves out is zero, in tensors as large.
    assert tokens.after(1, large, wanted=1) == pytest.approx(2 * 64 / (3 * 64), rel=1e-2)


def test_layers_by_blocks_of_rows_hold_little() -> None:
    """No memory of its own is for what lies between products, and nothing is filled with zeros."""
    fresh = Curve(sizes=(1.0, 1e6, 1e9), seconds=(1e-15, 2e-15, 1.0))
    model = replace(attention_only(2), intermediate=640)
    plain, blocks = (TokenTimes(ideal(copy_fresh=fresh), replace(model, fused=each)) for each in (False, True))
    # Many: the first million bytes of the curve take nothing.
    tokens = random.randint(20_000, 90_000)
    # New are queries, keys and values, and a layer's hidden states: each by its share of what is held.
    hold = tokens * (3 * 64 + 1536) * 4 / 1e9
    assert blocks.before(0, tokens) == pytest.approx(hold * 1536 / (3 * 64 + 1536), rel=1e-2)
    assert blocks.after(0, tokens) == pytest.approx(hold * 64 / (3 * 64 + 1536), rel=1e-2)
    assert blocks.after(1, tokens, wanted=1) == pytest.approx(blocks.after(0, tokens), rel=1e-2)
    assert plain.after(0, tokens) > 10 * blocks.after(0, tokens)


def test_what_the_last_layer_leaves_out_is_filled_with_zeros() -> None:
    copy = Curve(sizes=(1.0, 1e9), seconds=(1e-9, 1.0))
    model = replace(attention_only(2), intermediate=640)
    tokens, wanted = random.randint(100, 900), random.randint(1, 9)
    times = TokenTimes(ideal(copy_bytes=copy), model)
    filled = (tokens - wanted) * 4e-9 / 2
    queries = HEADS * 64
    assert times.before(1, tokens, wanted=wanted) - times.before(0, tokens) == pytest.approx(filled * queries)
    feed_forward = (model.feed_forward_tensors - 1) * 640 + 64
    after = times.after(1, tokens, wanted=wanted) - times.after(0, tokens)
    assert after == pytest.approx(filled * (queries + 64 + feed_forward))


def test_the_first_layer_pays_for_pages_that_others_use_again() -> None:
    """A process without memory to use again; where every layer pays, nothing is added."""
    size = 64 << 20
    fresh = Curve(sizes=(1.0, 32 << 20, size), seconds=(1e-15, 2e-15, 1.0))
    tokens = TokenTimes(ideal(copy_fresh=fresh), attention_only(2))
    held = 3 * 64 * 4
    assert tokens.first_s(1000) == pytest.approx(1000 * held / size)
    assert tokens.first_s(size / held) == pytest.approx(0, abs=1e-9)


def test_cached_tokens_keep_the_chain_in_step() -> None:
    """Every rank's queries see all cached keys; an uneven chain is as slow as its slowest rank in every layer."""
    cached = 30_000
    predicted = times(3000, 3, cached=cached)
    for partition in ((1000, 1000, 1000), (1400, 900, 700), (2000, 500, 500)):
        prefixes = (0, partition[0], partition[0] + partition[1])
        slowest = max(pairs_s(n, before + cached) for n, before in zip(partition, prefixes, strict=True))
        assert predicted.seconds("runahead", (partition,)) == pytest.approx(3 * slowest, rel=2e-2)


def test_every_method_of_every_pass() -> None:
    for _ in range(40):
        size, batch = random.randint(2, 7), random.randint(1, 3)
        new = tuple(random.randint(2 * size, 9000) for _ in range(batch))
        cached = tuple(random.choice((0, 1, 5000)) for _ in range(batch))
        profile = ideal(exchange=Curve.affine(1e-4, 1e9), collective=Curve.affine(1e-3, 1e9), exposed=(0.3, 0.4))
        predicted = PrefillTimes(
            profile,
            attention_only(3, dense=9999, window=random.choice((None, 700))),
            Workload(new, cached, size),
            kv=random.choice(("sharded", "last")),
        )
        partitions = tuple(even(tokens, size) for tokens in new)
        for method in ("single", "runahead", "pass_kv", "pass_q", "all_gather", "tsp", "tsp_causal"):
            assert 0 < predicted.seconds(method, partitions) < 1e4
