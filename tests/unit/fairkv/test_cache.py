"""A cache over ragged stores: what it reports, cuts back and copies."""

import copy
from typing import Any

import numpy as np
import torch

from megakv.cache.cache import ShardedCache
from megakv.cache.dense import DenseStore
from megakv.cache.ragged import RaggedStore
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import new_tokens


def grow(cache: ShardedCache, length: int, keep: list[int] | None) -> None:
    """Add a pass of two sequences; of a compressed one each head keeps that many of the latest tokens."""
    first = cache.length
    mask = np.ones((2, length), dtype=bool)
    layout = balanced(new_tokens(mask, np.broadcast_to(np.arange(first, first + length), mask.shape), first), 1)
    cache.begin(layout, 2)
    for layer in range(2):
        store = cache.store(layer)
        for row in range(2):
            tokens = torch.arange(first, first + length).float().view(1, -1, 1).repeat(len(keep or [0, 0]), 1, 4)
            store.append(row, tokens, tokens)
            if keep is not None:
                mask_of = torch.stack([torch.arange(length) >= length - count for count in keep])
                store.compress(row, mask_of)
    cache.commit(first + length, compressed=() if keep is None else (0, 1))


def kept_values(cache: ShardedCache, row: int, head: int) -> list[int]:
    """Tokens of one head in layer 1, by the value that was stored."""
    store: Any = cache.store(1)
    found = [keys for body in store.bodies(row) for keys, _, _ in body.pieces(head)]
    slots = cache.table.slots(0, row)
    for part in store.parts(row, slots, slots):
        if hasattr(part, "k_KSD"):
            assert part.k_KSD[head, :, 0].tolist() == part.slots.tolist()
            found.append(part.k_KSD[head : head + 1])
    return sorted(int(value) for keys in found for value in keys[0, :, 0])


def test_turns_crops_and_forks() -> None:
    cache = ShardedCache(2, size=1, rank=0, compresses=True)
    assert cache.head_tokens() == []
    grow(cache, 100, [30, 2])
    grow(cache, 7, None)
    grow(cache, 50, [1, 20])
    grow(cache, 3, None)
    assert cache.compressed == [[(0, 100), (107, 157)]] * 2
    assert cache.head_tokens() == [[2 * (30 + 7 + 1 + 3), 2 * (2 + 7 + 20 + 3)]] * 2
    first, second = [*range(70, 107), 156, 157, 158, 159], [98, 99, *range(100, 107), *range(137, 160)]
    assert kept_values(cache, 0, 0) == first and kept_values(cache, 1, 1) == second
    twin = copy.deepcopy(cache)
    for slots, spans in (
        (158, [(0, 100), (107, 157)]),
        (150, [(0, 100), (107, 150)]),
        (103, [(0, 100)]),
        (80, [(0, 80)]),
    ):
        twin.cut_back(slots)
        assert twin.length == slots and twin.compressed == [spans] * 2
        assert kept_values(twin, 0, 0) == [value for value in first if value < slots]
        assert kept_values(twin, 1, 1) == [value for value in second if value < slots]
    grow(twin, 5, None)
    assert kept_values(twin, 0, 0) == [*range(70, 80), *range(80, 85)]
    assert kept_values(cache, 0, 0) == first
    cache.reorder_cache(torch.tensor([1, 1]))
    assert kept_values(cache, 0, 1) == second
    cache.reset()
    assert not cache.holds_compressed and cache.nbytes() == 0
    grow(cache, 10, None)
    assert kept_values(cache, 1, 0) == list(range(10))


def test_a_dense_layer_is_freed_as_it_is_compressed() -> None:
    store = RaggedStore(1, DenseStore(1))
    store.append(0, torch.randn(4, 1000, 32), torch.randn(4, 1000, 32))
    before = store.nbytes()
    # 100 tokens of each head, wherever they are.
    store.compress(0, torch.rand(4, 1000).argsort(dim=1) < 100)
    assert store.nbytes() <= 0.12 * before
    store.append(0, torch.randn(4, 10, 32), torch.randn(4, 10, 32))
    store.append(0, torch.randn(4, 500, 32), torch.randn(4, 500, 32))
    kept = int(store.kept(0).sum())
    store.compress(0, torch.zeros(4, 500, dtype=torch.bool))
    assert int(store.kept(0).sum()) == kept - 2000
    assert store.nbytes() <= 1.05 * (kept - 2000) * 2 * 32 * 4
