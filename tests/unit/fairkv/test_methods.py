"""Each method keeps what its formula says, written out plainly on whole attention matrices."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megakv.attention.method import AttentionCall
from megakv.attention.partial import PartialAttention, Scoring
from megakv.base.errors import MegaKVError
from megakv.cache.dense import DenseStore
from megakv.cache.ragged import RaggedStore
from megakv.distributed.layouts import balanced
from megakv.distributed.ledger import Ledger
from megakv.distributed.sharding import TokenTable, new_tokens
from megakv.engine.config import load_config
from megakv.fairkv.compression import Compressor
from megakv.fairkv.config import FairKVConfig
from megakv.fairkv.methods import METHODS, read_importance
from megakv.fairkv.observation import Turn
from megakv.weights.placement.heads import contiguous_head_map

HEADS, KV_HEADS, DIM, LAYERS = 8, 4, 16, 3
WINDOW = 8


class Alone:
    """Communication of a single rank."""

    mesh = SimpleNamespace(cp_rank=0, cp_size=1, tp_rank=0, tp_size=1)
    ledger = Ledger()

    @staticmethod
    def all_gather(tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        return tensor[None]

    @staticmethod
    def all_reduce(counts: torch.Tensor, over: str, **_: Any) -> torch.Tensor:
        return counts


def keep(section: dict[str, Any], lengths: list[int], layer: int, scoring: Scoring) -> tuple[list[np.ndarray], Any]:
    """Compress one layer's cache of random keys; per sequence ``[K, n]`` what was kept, and its attention weights."""
    width = max(lengths)
    mask = np.arange(width)[None] >= width - np.array(lengths)[:, None]
    tokens = new_tokens(mask, np.broadcast_to(np.arange(width), mask.shape), 0)
    layout = balanced(tokens, 1)
    table = TokenTable(1, len(lengths))
    table.extend(layout)
    q = torch.randn(HEADS, len(tokens), DIM, dtype=torch.float64)
    k = torch.randn(KV_HEADS, len(tokens), DIM, dtype=torch.float64)
    store = RaggedStore(len(lengths), DenseStore(len(lengths)))
    lse = torch.empty(HEADS, len(tokens), dtype=torch.float64)
    weights = []
    for sequence, length in enumerate(lengths):
        run = tokens.run(sequence)
        slots = tokens.slot[run]
        store.append(sequence, k[:, run], k[:, run])
        partial = PartialAttention(q[:, run], slots, scoring)
        partial.add(k[:, run], k[:, run], slots)
        lse[:, run] = partial.lse
        scores = q[:, run] @ k[:, run].repeat_interleave(2, 0).transpose(1, 2) * scoring.scale
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if scoring.window is not None:
            seen &= ~torch.ones(length, length, dtype=torch.bool).tril(-scoring.window)
        weights.append(scores.masked_fill(~seen, -torch.inf).softmax(-1).view(KV_HEADS, 2, length, length).numpy())
    heads = contiguous_head_map(LAYERS, HEADS, KV_HEADS, 1)
    comm: Any = Alone()
    compressor = Compressor(FairKVConfig(**section), heads, comm)
    call = AttentionCall(layer, q, k, k, layout, scoring, KV_HEADS, DIM, DIM, store, table, comm)
    compressor.compress(call, lse, Turn(0, width), range(len(lengths)))
    kept = []
    for sequence, length in enumerate(lengths):
        (body,) = store.bodies(sequence)
        found = np.zeros((KV_HEADS, length), dtype=bool)
        for head in range(KV_HEADS):
            for _, _, rows in body.pieces(head):
                found[head, rows] = True
        kept.append(found)
    return kept, weights


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Mask of the `count` highest of each row."""
    mask = np.zeros(scores.shape, dtype=bool)
    for row, score in enumerate(scores):
        mask[row, np.argsort(-score, kind="stable")[:count]] = True
    return mask


def coarse(peaks: np.ndarray) -> np.ndarray:
    """Peaks as they count: 17 bits of each."""
    bits = peaks.astype(np.float32).view(np.int32)
    return ((bits + 64) & -128).view(np.float32).astype(float)


def snap_scores(weights: np.ndarray, pool: int = 7, peak: bool = False) -> np.ndarray:
    """SnapKV: mean over the window, maximum over neighbours, and the window itself on top."""
    length = weights.shape[-1]
    if peak:
        # Looks at the tokens right before a query, as many as are pooled, say nothing of later ones.
        seen = coarse((weights * np.tri(length, k=-pool - 1)).max((1, 2)))
    else:
        seen = weights[:, :, -WINDOW:].sum((1, 2))
    seen[:, -WINDOW:] = 0
    pooled = np.stack([seen[:, max(0, j - pool // 2) : j + pool // 2 + 1].max(1) for j in range(length)], axis=1)
    pooled[:, -WINDOW:] = np.inf
    return pooled


LENGTHS = [150, 71]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("pool", "peak"), [(7, False), (1, False), (5, True)])
def test_snapkv(pool: int, peak: bool, window: int | None) -> None:
    section: dict[str, Any] = {"method": "snapkv", "budget": 0.3, "window": WINDOW, "pool": pool}
    if peak:
        section |= {"observe": "prompt", "reduce": "peak"}
    kept, weights = keep(section, LENGTHS, 0, Scoring(0.6, window=window))
    for found, each, length in zip(kept, weights, LENGTHS, strict=True):
        assert np.array_equal(found, best(snap_scores(each, pool, peak), round(0.3 * length)))


def test_snapkv_by_the_mean_of_neighbours() -> None:
    section = {"method": "snapkv", "budget": 40, "window": WINDOW, "pool": 5, "pooling": "mean"}
    kept, weights = keep(section, LENGTHS, 0, Scoring(0.6))
    for found, each in zip(kept, weights, strict=True):
        seen = np.pad(each[:, :, -WINDOW:, :-WINDOW].sum((1, 2)), ((0, 0), (2, 2)))
        scores = np.stack([seen[:, j : j + 5].sum(1) for j in range(seen.shape[1] - 4)], axis=1)
        scores = np.pad(scores, ((0, 0), (0, WINDOW)), constant_values=np.inf)
        assert np.array_equal(found, best(scores, 40))


def test_h2o_by_query() -> None:
    kept, weights = keep({"method": "h2o", "budget": 40, "recent": 0.0, "per_query": True}, LENGTHS, 0, Scoring(0.6))
    for found, each in zip(kept, weights, strict=True):
        length = each.shape[-1]
        assert np.array_equal(found, best(each.sum((1, 2)) / np.arange(length, 0, -1), 40))


def test_streaming_llm() -> None:
    kept, _ = keep({"method": "streaming_llm", "budget": 40, "sinks": 3}, LENGTHS, 0, Scoring(0.3))
    for found, length in zip(kept, LENGTHS, strict=True):
        expected = np.zeros(length, dtype=bool)
        expected[:3] = expected[length - 37 :] = True
        assert (found == expected).all()


def test_h2o() -> None:
    kept, weights = keep({"method": "h2o", "budget": 40}, LENGTHS, 0, Scoring(0.6))
    for found, each in zip(kept, weights, strict=True):
        scores = each.sum((1, 2))
        scores[:, -20:] = np.inf
        assert np.array_equal(found, best(scores, 40))


@pytest.mark.parametrize("layer", [0, 2])
def test_pyramidkv(layer: int) -> None:
    section = {"method": "pyramidkv", "budget": 28, "window": WINDOW, "decay": 4}
    kept, weights = keep(section, LENGTHS, layer, Scoring(0.6))
    # 20 beside the window: 35 in the first layer, 5 in the last.
    for found, each in zip(kept, weights, strict=True):
        assert np.array_equal(found, best(snap_scores(each), WINDOW + (35 if layer == 0 else 5)))


def test_ada_snapkv() -> None:
    section = {"method": "ada_snapkv", "budget": 30, "window": WINDOW, "safeguard": 0.5, "pool": 1}
    kept, weights = keep(section, LENGTHS, 0, Scoring(0.6))
    for found, each in zip(kept, weights, strict=True):
        scores = snap_scores(each, 1)
        safe = best(scores, 8 + 11)
        rest = np.where(safe, -1.0, scores)
        expected = safe | best(rest.reshape(1, -1), 11 * KV_HEADS).reshape(rest.shape)
        assert np.array_equal(found, expected)
        assert found.sum() == 30 * KV_HEADS and len(set(found.sum(1))) > 1


def test_ada_snapkv_compares_peaks_as_they_are() -> None:
    section = {"method": "ada_snapkv", "budget": 30, "window": WINDOW, "pool": 1, "observe": "prompt", "reduce": "peak"}
    kept, weights = keep(section, LENGTHS, 0, Scoring(0.6))
    for found, each in zip(kept, weights, strict=True):
        scores = snap_scores(each, 1, peak=True)
        safe = best(scores, 8 + 4)
        rest = np.where(safe, -1.0, scores)
        assert np.array_equal(found, safe | best(rest.reshape(1, -1), 18 * KV_HEADS).reshape(rest.shape))


def test_headkv(write_json: Callable[[str, Any], Path]) -> None:
    weights = [[1, 0, 0, 1], [4, 0, 0, 0], [2, 0, 0, 0]]
    path = write_json("importance.json", {"model": "x", "budgets": weights})
    section = {"method": "headkv", "budget": 20, "window": WINDOW, "importance": str(path), "spread": 2.0}
    kept, each = keep(section, [150], 0, Scoring(0.6))
    # Bases of 10; a pool of 10 x 12 divided by 8.
    assert kept[0].sum(1).tolist() == [25, 10, 10, 25]
    for head, count in enumerate([25, 10, 10, 25]):
        assert np.array_equal(kept[0][head], best(snap_scores(each[0])[head : head + 1], count)[0])


def test_headkv_by_its_formula(write_json: Callable[[str, Any], Path]) -> None:
    """b - b / beta tokens for every head, and of the pool of all heads' b / beta a share by importance."""
    importance = np.random.rand(LAYERS, KV_HEADS)
    path = write_json("importance.json", {"importance": importance.tolist()})
    section = {"method": "headkv", "budget": 40, "window": WINDOW, "importance": str(path), "spread": 1.6}
    for layer in range(LAYERS):
        kept, _ = keep(section, [400], layer, Scoring(0.6))
        expected = 15 + 25 * importance.size * importance[layer] / importance.sum()
        assert (abs(kept[0].sum(1) - expected) < 1).all()


@pytest.mark.parametrize(
    ("section", "least"), [({"method": "snapkv"}, 32), ({"method": "streaming_llm", "sinks": 40}, 41)]
)
def test_budgets_below_what_is_kept_in_any_case(section: dict[str, Any], least: int) -> None:
    comm: Any = Alone()
    heads = contiguous_head_map(LAYERS, HEADS, KV_HEADS, 1)
    Compressor(FairKVConfig(budget=least, **section), heads, comm)
    with pytest.raises(ValueError, match=f"budget = {least - 1} tokens per head is below the {least} that"):
        Compressor(FairKVConfig(budget=least - 1, **section), heads, comm)


def test_what_fits_is_kept_whole() -> None:
    for method in ("snapkv", "h2o", "streaming_llm", "ada_snapkv", "pyramidkv"):
        kept, _ = keep({"method": method, "budget": 71}, [150, 71, 3], 1, Scoring(0.3))
        assert kept[2].all(), method
        assert method == "pyramidkv" or kept[1].all(), method


def test_every_method_is_registered_under_its_name() -> None:
    assert list(METHODS) == ["streaming_llm", "snapkv", "pyramidkv", "h2o", "ada_snapkv", "headkv"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"method": "snapkv", "sinks": 4},
            "megakv.fairkv.sinks is not a setting of method 'snapkv', which has: window",
        ),
        ({"method": "snapkv", "window": 0}, "megakv.fairkv.window = 0: allowed: greater than or equal to 1"),
        ({"method": "ada_snapkv", "pool": 4}, "megakv.fairkv.pool = 4: allowed: odd numbers"),
        (
            {"method": "ada_snapkv", "safeguard": 1.5},
            "megakv.fairkv.safeguard = 1.5: allowed: less than or equal to 1",
        ),
        (
            {"method": "h2o", "decode_interval": 16},
            "megakv.fairkv.decode_interval = 16 with megakv.fairkv.budget = 0.25: what holds for an answer",
        ),
        ({"method": "h2o", "recent": -0.1}, "megakv.fairkv.recent = -0.1: allowed: greater than or equal to 0"),
        (
            {"method": "pyramidkv", "decay": 0.5},
            "megakv.fairkv.decay = 0.5: allowed: greater than or equal to 1",
        ),
        (
            {"method": "streaming_llm", "sinks": -1},
            "megakv.fairkv.sinks = -1: allowed: greater than or equal to 0",
        ),
        ({"method": "headkv"}, "megakv.fairkv.method = 'headkv' needs megakv.fairkv.importance"),
        (
            {"method": "headkv", "importance": "nowhere.json"},
            "megakv.fairkv.importance = 'nowhere.json' cannot be read",
        ),
    ],
)
def test_bad_settings_are_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        config = load_config({"megakv": {"fairkv": {"budget": 0.25, **section}}})
        config.megakv.fairkv.make_method(LAYERS, KV_HEADS)
    assert message in str(caught.value)


@pytest.mark.parametrize("budget", [0, -3, 1.5, "many", True, float("inf")])
def test_impossible_budgets_are_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match=f"megakv.fairkv.budget = {budget!r}: "):
        load_config({"megakv": {"fairkv": {"budget": budget}}})


def test_settings_without_a_budget_are_refused() -> None:
    assert load_config({"megakv": {"fairkv": {}}}).megakv.fairkv.budget is None
    with pytest.raises(ValueError, match="method is given, but nothing is compressed without megakv.fairkv.budget"):
        load_config({"megakv": {"fairkv": {"method": "snapkv"}}})
    with pytest.raises(ValueError, match="megakv.fairkv.method = 'zip': allowed: 'streaming_llm', 'snapkv'"):
        load_config({"megakv": {"fairkv": {"method": "zip", "budget": 0.5}}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"budgets": [[1, 2], [3, 4]]}, "is of another model: 2 layers of 2 KV heads, this one has 3 of 4"),
        ({"budgets": [[0] * 4] * 3}, "not all 0"),
        ({"budgets": [[1, 1, 1, -1]] * 3}, "none below 0"),
        ({"budgets": [[1, 2], [3]]}, "holds no numbers"),
        ({"other": 1}, "holds no numbers"),
        ([1, 2], "holds no numbers"),
    ],
)
def test_bad_importance_is_named(write_json: Callable[[str, Any], Path], content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_importance(str(write_json("importance.json", content)), LAYERS, KV_HEADS)


def test_each_row_is_compressed_by_its_own_length() -> None:
    comm: Any = Alone()
    heads = contiguous_head_map(LAYERS, HEADS, KV_HEADS, 1)
    compressor = Compressor(FairKVConfig(budget=0.5, min_tokens=100), heads, comm)
    assert compressor.rows(np.array([5, 300, 99, 100])) == (1, 3)
    # What has no more tokens than it may keep is kept whole.
    compressor = Compressor(FairKVConfig(budget=200, min_tokens=100), heads, comm)
    assert compressor.rows(np.array([5, 300, 199, 200, 201])) == (1, 4)
    compressor.check(Turn(0, 1 << 24))
    with pytest.raises(MegaKVError, match="not supported beyond 16777216 tokens"):
        compressor.check(Turn(300, 1 << 25))
