"""Predicted seconds against what a person would work out for imagined machines."""

import math
import random

import numpy as np
import pytest
import torch

from megakv.attention.visibility import plan_blocks
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.curves import Curve
from megakv.costmodel.dense import dense_seconds
from megakv.costmodel.shape import AttentionShape, LayerShape, ModelShape
from megakv.distributed.layouts import balanced
from megakv.planner.measure.trial import tokens
from tests.unit.costmodel.profiles import ideal, pair_table

HEADS = 8
PAIR_S = 1e-9
SHAPE = AttentionShape(HEADS, HEADS, 64, 64, 4)


def predict(method: str, new: int, cached: int, size: int, *, shape: AttentionShape = SHAPE, **machine: object) -> dict:
    times = LayerTimes(ideal(seconds_per_pair=PAIR_S, **machine), shape, Workload((new,), (cached,), size))  # type: ignore[arg-type]
    prediction = times.predict(method)
    assert prediction.seconds == pytest.approx(sum(prediction.terms.values()))
    return prediction.terms


def visible_pairs(new: int, cached: int) -> float:
    return new * cached + new * new / 2


@pytest.mark.parametrize("method", ["pass_kv", "pass_q", "all_gather"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_computes_its_share_of_the_pairs(method: str, size: int) -> None:
    for new, cached in ((2048 * size, 0), (1024 * size, 4096 * size), (256 * size, 100_000)):
        attention = predict(method, new, cached, size)["attention"]
        assert attention == pytest.approx(HEADS * PAIR_S * visible_pairs(new, cached) / size, rel=2e-3)


def test_work_of_a_step_is_that_of_the_planned_blocks() -> None:
    """Rows and keys of every kernel call, for ranks before and behind, as the layout and the planner make them."""
    for size in (2, 3, 4):
        chunk, cached = random.randint(64, 200), random.choice((0, size * random.randint(100, 999)))
        new = 2 * size * chunk
        held = np.full((size, 1), cached // size)
        layout = balanced(tokens((new,), (cached,)), size, held if cached else None)
        old = balanced(tokens((cached,), (0,)), size).tokens if cached else None
        table = pair_table(PAIR_S).model_copy(update={"causal": Curve(sizes=(1.0, 2.0), seconds=(7.0, 14.0))})
        times = LayerTimes(ideal(attention=(table,)), SHAPE, Workload((new,), (cached,), size))
        for rank in range(size):
            for source in range(size):
                queries = layout.tokens[rank].slot
                keys = layout.tokens[source].slot
                keys = keys if old is None else np.concatenate([old[source].slot, keys])
                expected = rows = 0.0
                for block in plan_blocks(queries, keys):
                    height, width = block.q1 - block.q0, block.k1 - block.k0
                    assert block.kind != "masked"
                    full = table.block(HEADS, height, width)
                    expected += table.square(HEADS, height) if block.kind == "causal" else full
                    rows += height
                shard = "own" if source == rank else "earlier" if source < rank else "later"
                step = times._sequence_step(shard, new, cached)
                assert step.attention_s == pytest.approx(expected, rel=1e-9), (size, rank, source, cached)
                assert step.seen_rows + step.merged_rows == pytest.approx(rows)


def test_exchange_is_hidden_or_exposed() -> None:
    new, cached, size = 1000, 7000, 4
    message = SHAPE.kv_row_bytes * 2000
    step_s = HEADS * PAIR_S * visible_pairs(new, cached) / size**2
    for factor in (0.5, 3.0):
        link = Curve.affine(0.0, message / (factor * step_s))
        terms = predict("pass_kv", new, cached, size, exchange=link)
        assert terms["exposed"] == pytest.approx(3 * max(0.0, factor - 1) * step_s, rel=0.05, abs=1e-6)


def test_shared_processor_exposes_what_is_hidden() -> None:
    message = SHAPE.kv_row_bytes * 2000
    link = Curve.affine(0.0, message / 1e-4)
    terms = predict("pass_kv", 1000, 3000, 2, exchange=link, exposed=(0.25, 0.5))
    assert terms["exposed"] == pytest.approx(0.25e-4, rel=1e-6)


def test_all_to_all_of_pass_q_is_never_hidden() -> None:
    link = Curve.affine(0.0, 1e9)
    terms = predict("pass_q", 1200, 5000, 3, collective=link)
    assert terms["collective"] == pytest.approx(800 * HEADS * 65 * 4 / 1e9)
    assert "collective" not in predict("pass_kv", 1200, 5000, 3, collective=link)
    gathered = predict("all_gather", 1200, 4800, 3, collective=link)
    assert gathered["collective"] == pytest.approx(2 * SHAPE.kv_row_bytes * 2000 / 1e9)


def test_a_closing_collective_waits_for_the_last_rank() -> None:
    for method, new in (("pass_q", 900), ("replicated", 1)):
        terms = predict(method, new, 5000, 3, straggle=0.125)
        assert terms["straggle"] == pytest.approx(terms["attention"] / 8)
    assert "straggle" not in predict("pass_kv", 900, 5000, 3, straggle=0.125)


def test_copies_and_merges() -> None:
    unit = Curve(sizes=(1.0, 1e9), seconds=(1.0, 1e9))
    outputs = HEADS * 64
    assert predict("pass_kv", 800, 0, 4, merge=unit)["merge"] == pytest.approx(3 * 200 * outputs)
    # With cached keys a rank's own square is merged to them too.
    assert predict("pass_kv", 800, 4000, 4, merge=unit)["merge"] == pytest.approx(4 * 200 * outputs)
    assert predict("pass_q", 800, 4000, 4, merge=unit)["merge"] == pytest.approx(200 * outputs)
    assert predict("pass_q", 800, 0, 4, combine=unit)["merge"] == pytest.approx(4 * 200 * outputs)
    kv = predict("pass_kv", 800, 4000, 4, copy_bytes=unit)["copy"]
    assert kv == pytest.approx(SHAPE.kv_row_bytes * 1200)
    part = 200 * SHAPE.partial_row_bytes
    # An earlier rank's queries see everything in one piece; a later rank's in two, which are put together.
    pieces = 3 * 200 * outputs * 4
    assert predict("pass_q", 800, 4000, 4, copy_fresh=unit)["copy"] == pytest.approx(4 * part + 4 * part + pieces)
    assert predict("pass_q", 800, 4000, 4, step_overhead_s={"pass_q": 2.0})["overhead"] == 8


def test_fused_batch_is_the_sum_of_its_sequences() -> None:
    profile = ideal(seconds_per_pair=PAIR_S)
    work = Workload((600, 0, 900), (1200, 30, 0), 3)
    attention = LayerTimes(profile, SHAPE, work).predict("pass_kv").terms["attention"]
    assert attention == pytest.approx(HEADS * PAIR_S * (visible_pairs(600, 1200) + visible_pairs(900, 0)) / 3, rel=1e-3)


def test_window_bounds_the_work() -> None:
    windowed = AttentionShape(HEADS, HEADS, 64, 64, 4, window=512)
    for size in (1, 2, 4):
        terms = predict("pass_kv", 32_768, 0, size, shape=windowed)
        exact = HEADS * PAIR_S * 32_768 * 512 / size
        assert exact <= terms["attention"] < 1.3 * exact
    assert predict("pass_kv", 100, 300, 2, shape=windowed) == predict("pass_kv", 100, 300, 2)


def test_few_rows_of_grouped_heads_are_packed() -> None:
    grouped = AttentionShape(HEADS, 2, 64, 64, 4)
    tables = (pair_table(PAIR_S, group=4), pair_table(10 * PAIR_S, group=1))
    terms = predict("replicated", 1, 8191, 2, shape=grouped, attention=tables)
    assert terms["attention"] == pytest.approx(HEADS * 10 * PAIR_S * 4096, rel=1e-2)
    assert predict("pass_kv", 400, 3696, 2, shape=grouped, attention=tables)["attention"] == pytest.approx(
        HEADS * PAIR_S * visible_pairs(400, 3696) / 2, rel=1e-2
    )


def test_nearest_table_is_scaled_to_the_head_dimension() -> None:
    wide = AttentionShape(HEADS, HEADS, 96, 80, 4)
    tables = (pair_table(PAIR_S, head_dim=64), pair_table(5 * PAIR_S, head_dim=128))
    attention = predict("pass_kv", 4096, 0, 2, shape=wide, attention=tables)["attention"]
    assert attention == pytest.approx(HEADS * 5 * PAIR_S * 96 / 128 * visible_pairs(4096, 0) / 2, rel=1e-2)
    biased = AttentionShape(HEADS, HEADS, 64, 64, 4, kernel="math")
    tables = (pair_table(PAIR_S), pair_table(3 * PAIR_S, kernel="math"))
    attention = predict("pass_kv", 4096, 0, 2, shape=biased, attention=tables)["attention"]
    assert attention == pytest.approx(HEADS * 3 * PAIR_S * visible_pairs(4096, 0) / 2, rel=1e-2)


def test_decode() -> None:
    """One token of each of five sequences, on four ranks: the fullest has two."""
    cached = tuple(random.randint(1000, 9000) for _ in range(5))
    work = Workload((1,) * 5, cached, 4)
    collective, link = Curve.affine(0.0, 1e8), Curve.affine(1e-3, 1e12)
    profile = ideal(seconds_per_pair=PAIR_S, exchange=link, collective=collective)
    times = LayerTimes(profile, SHAPE, work)
    attention = HEADS * PAIR_S * (sum(cached) + 5) / 4
    replicated = times.predict("replicated").terms
    assert replicated["attention"] == pytest.approx(attention)
    assert replicated["collective"] == pytest.approx(3 * 5 * HEADS * 65 * 4 / 1e8)
    pass_q = times.predict("pass_q").terms
    assert pass_q["attention"] == pytest.approx(attention)
    assert pass_q["exposed"] == pytest.approx(3 * (1e-3 - attention / 4), rel=1e-2)
    # A rank with one query of its own sends the results of four.
    assert pass_q["collective"] == pytest.approx(4 * HEADS * 65 * 4 / 1e8)


def model(dense: int, n_layers: int = 3) -> ModelShape:
    layers = (LayerShape(dense),) * (n_layers - 1) + (LayerShape(2 * dense),)
    return ModelShape(64, 128, 100, HEADS, HEADS, 64, 64, layers, 1000, torch.float32)


def test_dense_part_of_decoding() -> None:
    profile = ideal(seconds_per_pair=PAIR_S, matmul=Curve(sizes=(1, 101), seconds=(1e-9, 2e-9)))
    layer = LayerShape(1_000_000)
    assert dense_seconds(profile, layer, 1) == pytest.approx(1e-3)
    assert dense_seconds(profile, layer, 51, tp_size=2) == pytest.approx(0.75e-3)
    routed = LayerShape(0, experts=8_000_000, n_experts=8, active_experts=2)
    assert dense_seconds(profile, routed, 1) == pytest.approx(2e-3)
    # Six tokens choose twelve times among eight experts: some of them twice.
    touched = 8_000_000 * (1 - 0.75**6)
    per_weight = 1e-9 * (1 + (12e6 / touched - 1) / 100)
    assert dense_seconds(profile, routed, 6) == pytest.approx(touched * per_weight)
    eight = profile.model_copy(update={"matmul_fp8": Curve(sizes=(1, 101), seconds=(5e-10, 1e-9))})
    mixed = LayerShape(1_000_000, experts=8_000_000, n_experts=8, active_experts=2, fp8=500_000, fp8_experts=True)
    assert dense_seconds(eight, mixed, 1) == pytest.approx(0.5e-3 + 0.25e-3 + 1e-3)


def test_predictions_are_finite_and_positive_everywhere() -> None:
    for _ in range(200):
        size = random.randint(1, 9)
        batch = random.randint(1, 4)
        new = tuple(random.choice((0, 1, 2, 30, 5000)) for _ in range(batch - 1)) + (random.randint(1, 70_000),)
        work = Workload(new, tuple(random.choice((0, 1, 77, 10**6)) for _ in range(batch)), size)
        shape = AttentionShape(12, random.choice((1, 3, 12)), 80, 48, 2, window=random.choice((None, 1, 4096)))
        for method in ("pass_kv", "pass_q", "all_gather", "replicated"):
            seconds = LayerTimes(ideal(), shape, work).predict(method).seconds
            assert math.isfinite(seconds) and seconds > 0
