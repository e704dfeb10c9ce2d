"""Spans of a cache: put behind one another, split, saved and read back, by any number of ranks, they are the cache."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megakv.base.errors import MegaKVError
from megakv.cache.cache import ShardedCache
from megakv.cache.saved_tokens import FORMAT
from megakv.cache.span import CacheSpan
from megakv.distributed.layouts import balanced, round_robin
from megakv.distributed.sharding import new_tokens

LAYERS, HEADS, DIM, VALUES = 3, 2, 4, 3
CPU = torch.device("cpu")


def content(layer: int, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that tell layer, head and slot."""
    numbers = torch.from_numpy(slots).float() + 10_000 * layer
    keys = numbers.view(1, -1, 1) + torch.arange(HEADS).view(-1, 1, 1) * 1e5 + torch.arange(DIM) / 8
    return keys, -keys[..., :VALUES].contiguous()


def grow(caches: list[ShardedCache], tokens: int) -> None:
    """All ranks' caches, by a pass of so many tokens."""
    size, length = len(caches), caches[0].length
    new = new_tokens(np.ones((1, tokens), bool), np.arange(length, length + tokens)[None] + 5, length)
    held = caches[0].table.counts() if length else None
    layout = (balanced if tokens > 1 else round_robin)(new, size, held)
    for rank, cache in enumerate(caches):
        cache.begin(layout, 1)
        if len(layout.stored[rank]):
            for layer in range(LAYERS):
                cache.store(layer).append(0, *content(layer, layout.stored[rank].slot))
        cache.commit(length + tokens)


def empty(size: int) -> list[ShardedCache]:
    return [ShardedCache(LAYERS, size=size, rank=rank) for rank in range(size)]


def check(caches: list[ShardedCache], length: int) -> None:
    """The caches hold each slot once, with its position, key and value."""
    found = np.sort(np.concatenate([cache.table.slots(rank, 0) for rank, cache in enumerate(caches)]))
    assert np.array_equal(found, np.arange(length))
    for rank, cache in enumerate(caches):
        assert cache.length == length
        slots, positions = cache.table.coordinates(rank, 0)
        assert np.array_equal(positions, slots + 5)
        for layer in range(LAYERS if len(slots) else 0):
            assert all(map(torch.equal, cache.store(layer).part(0), content(layer, slots)))


def drawn(size: int) -> tuple[list[ShardedCache], int]:
    random, caches = np.random.default_rng(), empty(size)
    for tokens in random.choice([1, 1, 2, 5, 37, 200], size=9).tolist():
        grow(caches, tokens)
    return caches, caches[0].length


@pytest.mark.parametrize("size", [1, 2, 3])
def test_spans_behind_one_another_are_the_cache(size: int) -> None:
    random = np.random.default_rng()
    caches, length = drawn(size)
    edges = [0, *np.sort(random.integers(0, length + 1, size=4)).tolist(), length]
    twins = empty(size)
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        at = int(random.integers(first, last + 1))
        for cache, twin in zip(caches, twins, strict=True):
            span = cache.span(first, last)
            assert (span.first, span.last, len(span)) == (first, last, last - first)
            for part in span.split(at):
                twin.append_span(part)
            # In the same memory.
            assert twin.length == last and sum(part.nbytes() for part in span.split(at)) == span.nbytes()
    check(twins, length)
    for group in (twins, caches, twins):
        grow(group, int(random.integers(1, 30)))
        check(group, group[0].length)


@pytest.mark.parametrize(("size", "other"), [(1, 1), (2, 2), (2, 3), (3, 1), (1, 2)])
def test_saved_spans_are_read_by_any_number_of_ranks(size: int, other: int, tmp_path: Path) -> None:
    caches, length = drawn(size)
    # Of a single token all but one rank have nothing.
    middle = int(np.random.default_rng().choice([1, np.random.default_rng().integers(0, length + 1)]))
    twins = empty(other)
    for first, last in ((0, middle), (middle, length)):
        paths = [tmp_path / f"{first}-{rank}.safetensors" for rank in range(size)]
        for _ in range(2):
            # Also in the place of a file that is there.
            for cache, path in zip(caches, paths, strict=True):
                cache.span(first, last).save(path)
        for rank, twin in enumerate(twins):
            twin.append_span(CacheSpan.load(paths, rank, other, CPU))
    assert not list(tmp_path.glob("*.new"))
    check(twins, length)
    grow(twins, 7)
    check(twins, length + 7)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    caches, length = drawn(2)
    paths = [tmp_path / f"{rank}.safetensors" for rank in range(2)]
    for cache, path in zip(caches, paths, strict=True):
        cache.span(0, length).save(path)
    whole = paths[1].read_bytes()
    broken = {
        "truncated": whole[: len(whole) // 2],
        "no span": b"nothing of the kind",
        "broken, or not of rank 1": paths[0].read_bytes(),
    }
    for content_of in broken.values():
        paths[1].write_bytes(content_of)
        for size in (2, 3):
            with pytest.raises(MegaKVError, match=str(paths[1])):
                CacheSpan.load(paths, 1, size, CPU)
    # Types and shapes that no cache has, and those that no tensor can have.
    (length_of,) = np.frombuffer(whole[:8], dtype=np.uint64).tolist()
    header, data = json.loads(whole[8 : 8 + length_of]), whole[8 + length_of :]
    name = "0.1.k"
    shape = header[name]["shape"]
    changes: list[dict[str, Any]] = [{"dtype": "I32"}, {"shape": [*shape[:2], 2 * shape[2]]}]
    changes += [{"shape": [0, shape[1], 1 << 62], "data_offsets": [0, 0]}, {"shape": [1, 0, (1 << 63) + 5]}]
    for change in changes:
        text = json.dumps({**header, name: {**header[name], **change}}).encode()
        paths[1].write_bytes(len(text).to_bytes(8, "little") + text + data)
        with pytest.raises(MegaKVError, match=str(paths[1])):
            CacheSpan.load(paths, 1, 2, CPU)
    caches[1].span(1, length).save(paths[1])
    with pytest.raises(MegaKVError, match="other slots"):
        CacheSpan.load(paths, 0, 3, CPU)
    # Of another version, or of none.
    for said, found in (({"format": "2"}, "2"), ({}, "None"), ({"format": "x"}, "None")):
        text = json.dumps({**header, "__metadata__": {**header["__metadata__"], "format": "", **said}}).encode()
        paths[1].write_bytes(len(text).to_bytes(8, "little") + text + data)
        with pytest.raises(MegaKVError, match=f"{paths[1]} has format {found}, this version reads format {FORMAT}"):
            CacheSpan.load(paths, 1, 2, CPU)
    with pytest.raises(MegaKVError, match="missing"):
        CacheSpan.load([paths[0], tmp_path / "none"], 1, 2, CPU)


def test_spans_that_do_not_fit_are_refused_and_change_nothing() -> None:
    (cache,), length = drawn(1)
    with pytest.raises(ValueError, match="do not follow"):
        cache.append_span(cache.span(0, length))
    with pytest.raises(ValueError, match="are not there"):
        cache.span(0, length + 1)
    other = ShardedCache(LAYERS, size=1, rank=0)
    other.append_span(cache.span(0, 2))
    span = cache.span(2, length)
    narrow = ((torch.zeros(1, length - 2, DIM),) * 2,)
    for layers, size in (((span.layers[0], narrow, span.layers[2]), 1), (span.layers[1:], 1), (span.layers, 2)):
        with pytest.raises(ValueError, match=r"do not follow"):
            other.append_span(CacheSpan(span.first, span.owners, span.positions, 0, size, layers))
        check([other], 2)
