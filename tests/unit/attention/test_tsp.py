"""The rectangle of TSP: exact under every kind of scoring, and every pair is computed."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from megakv.attention import partial
from megakv.attention.partial import Scoring
from megakv.attention.tsp import RectangleAttention, stretches
from megakv.attention.visibility import SHORT_STEP, visible_pairs
from tests.reference import reference_attention

SCORINGS = {
    "plain": Scoring(0.25),
    "window": Scoring(0.25, window=7),
    "wide window": Scoring(0.25, window=900),
    "softcap": Scoring(0.25, softcap=3.0),
    "alibi": Scoring(0.25, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
}


def shards(length: int, ranks: int) -> list[np.ndarray]:
    return np.array_split(np.arange(length), ranks)


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS.keys())
@pytest.mark.parametrize(("length", "ranks"), [(1, 3), (5, 3), (83, 4), (2600, 3)])
def test_rectangles_equal_the_whole_and_skip_no_pair(
    monkeypatch: pytest.MonkeyPatch, length: int, ranks: int, scoring: Scoring
) -> None:
    computed: list[int] = []
    attend_block = partial.attend_block

    def counted(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        computed.append(q.shape[1] * k.shape[1])
        assert not kwargs["causal"]
        return attend_block(q, k, *args, **kwargs)

    monkeypatch.setattr(partial, "attend_block", counted)
    q, k, v = (torch.randn(length, heads, 16).transpose(0, 1) for heads in (4, 2, 2))
    positions = np.arange(length) - 3
    expected = reference_attention(q, k, v, np.arange(length), np.arange(length), scoring, positions)
    for own in shards(length, ranks):
        attention = RectangleAttention(q[:, own], own, scoring)
        for index in np.random.default_rng(random.getrandbits(32)).permutation(ranks):
            slots = shards(length, ranks)[index]
            attention.add(k[:, slots], v[:, slots], slots, positions[slots])
        assert sum(computed) == len(own) * length
        computed.clear()
        torch.testing.assert_close(attention.out.double(), expected[0][:, own], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(attention.lse.double(), expected[1][:, own], rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("window", [None, 1, 40, 700, 3000])
def test_stretches_cover_all_keys_and_say_who_sees_them(window: int | None) -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    for _ in range(50):
        q_slots, k_slots = (np.flatnonzero(rng.random(4000) < density) for density in rng.uniform(0.01, 1, 2))
        q_slots = q_slots[rng.integers(len(q_slots)) :]
        k_slots = k_slots[: rng.integers(1, len(k_slots) + 1)]
        visible = visible_pairs(q_slots, k_slots, window)
        found = stretches(q_slots, k_slots, window)
        assert [stretch.k0 for stretch in found] == [0, *(stretch.k1 for stretch in found[:-1])]
        assert found[-1].k1 == len(k_slots)
        for k0, k1, kind in found:
            seen = visible[:, k0:k1]
            assert kind != "full" or seen.all()
            assert kind != "hidden" or not seen.any()
        # A short stretch beside a masked one joins it; without a mask there is nothing to join.
        masked = any(kind == "masked" for *_, kind in found)
        assert not masked or all(k1 - k0 >= SHORT_STEP for k0, k1, kind in found if kind != "masked")
        assert len(found) <= 5


def test_only_the_diagonal_needs_a_mask() -> None:
    own, earlier, later = np.arange(1000, 2000), np.arange(1000), np.arange(2000, 3000)
    assert [stretches(own, keys, None) for keys in (earlier, own, later)] == [
        [(0, 1000, "full")],
        [(0, 1000, "masked")],
        [(0, 1000, "hidden")],
    ]
    turn = np.concatenate([np.arange(600), own])
    assert stretches(own, turn, None) == [(0, 601, "full"), (601, 1600, "masked")]
