"""Who computes and keeps the new tokens of a pass: the ways in which they are spread over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from megakv.distributed.sharding import IntArray, Layout, TokenBlock, chunk_bounds

SHORT = 256
"""Tokens of a sequence that may be one rank's: by as many may ranks differ in what they hold of it."""
UNEVEN_SHARE = 16
"""One part in so many of a rank's tokens may one have more of such than another."""


def _select(new: TokenBlock, owner: IntArray, size: int) -> tuple[TokenBlock, ...]:
    return tuple(new.take(owner == rank) for rank in range(size))


def _chunk_owners(tokens: int, size: int, held_N: IntArray) -> tuple[IntArray, IntArray]:
    """The rank of each of a sequence's 2N chunks, and their sizes.

    Pairs i and 2N-1-i with more tokens go to the ranks that hold fewest of the sequence, so that ranks differ by at
    most one token however many turns there were.
    """
    sizes = np.diff(chunk_bounds(tokens, 2 * size))
    owners = np.empty(size, dtype=np.int64)
    pairs = np.argsort(-(sizes[:size] + sizes[: size - 1 : -1]), kind="stable")
    owners[pairs] = np.argsort(held_N, kind="stable")
    return np.concatenate([owners, owners[::-1]]), sizes


def balanced_tokens(lengths: Sequence[int], size: int) -> list[int]:
    """How many tokens of new sequences `balanced` gives to each rank."""
    counts = np.zeros(size, dtype=np.int64)
    for tokens in lengths:
        owners, sizes = _chunk_owners(tokens, size, np.zeros(size, dtype=np.int64))
        np.add.at(counts, owners, sizes)
    return [int(count) for count in counts]


def balanced(
    new: TokenBlock, size: int, held: IntArray | None = None, whole: Mapping[int, int] = MappingProxyType({})
) -> Layout:
    """Load-balanced shards (context parallelism, Section 3.5.1): 2N chunks, a rank takes chunks i and 2N-1-i.

    Every sequence is balanced by itself, but for those that are a rank's as a `whole`; `held` are the ``[N, B]`` tokens
    that each rank holds already.
    """
    if size == 1:
        return Layout((new,), (new,))
    held = np.zeros((size, new.batch), dtype=np.int64) if held is None else held
    owner = np.empty(len(new), dtype=np.int64)
    for sequence in range(new.batch):
        run = new.run(sequence)
        if sequence in whole:
            owner[run] = whole[sequence]
        else:
            owner[run] = np.repeat(*_chunk_owners(run.stop - run.start, size, held[:, sequence]))
    shards = _select(new, owner, size)
    return Layout(shards, shards)


def by_sequence(new: TokenBlock, size: int, held: IntArray | None = None) -> Layout:
    """What is short of sequences of which nothing is cached on one rank each, as far as ranks get about as many tokens;
    the others as in `balanced`.

    Attention within such a one is a single piece, and asks nothing of other ranks.
    """
    lengths = np.diff(new.bounds)
    short = (0 < lengths) & (lengths <= SHORT)
    if held is not None:
        short &= held.sum(0) == 0
    tokens, whole = [0] * size, [list[int]() for _ in range(size)]
    for sequence in sorted(np.flatnonzero(short).tolist(), key=lambda each: -lengths[each]):
        rank = tokens.index(min(tokens))
        whole[rank].append(sequence)
        tokens[rank] += int(lengths[sequence])
    while max(tokens) - min(tokens) > len(new) // (size * UNEVEN_SHARE):
        # The shortest of the rank that has most is divided.
        most = tokens.index(max(tokens))
        tokens[most] -= int(lengths[whole[most].pop()])
    layout = balanced(new, size, held, {sequence: rank for rank, own in enumerate(whole) for sequence in own})
    return replace(layout, apart=sum(tokens) == len(new))


def contiguous(new: TokenBlock, partitions: Sequence[Sequence[int]], *, gathered: bool = False) -> Layout:
    """Contiguous shards in rank order (KV-Runahead, Section 4), given each sequence's tokens of each rank.

    With `gathered` the last rank keeps the keys and values of all of them, instead of each rank its own.
    """
    size = len(partitions[0])
    owner = np.empty(len(new), dtype=np.int64)
    for sequence, sizes in enumerate(partitions):
        run = new.run(sequence)
        if min(sizes) < 0 or sum(sizes) != run.stop - run.start:
            raise ValueError(
                f"the partition {list(sizes)} of sequence {sequence} must be {size} numbers >= 0 "
                f"that sum to its {run.stop - run.start} new tokens"
            )
        owner[run] = np.repeat(np.arange(size), sizes)
    shards = _select(new, owner, size)
    stored = _select(new, np.full(len(new), size - 1), size) if gathered else shards
    return Layout(shards, stored, gathered=gathered)


def on_last_rank(new: TokenBlock, size: int) -> Layout:
    """All tokens on the last rank, which computes and keeps them."""
    shards = _select(new, np.full(len(new), size - 1), size)
    return Layout(shards, shards)


def round_robin(new: TokenBlock, size: int, held: IntArray | None = None) -> Layout:
    """Decoded tokens dealt out one by one; each rank computes and keeps its own.

    A token goes to the rank that holds fewest of its sequence (Algorithm 4's rotation). Ties rotate with slot and batch
    row, so that the tokens of one step spread over the ranks.
    """
    counts = np.zeros((size, new.batch), dtype=np.int64) if held is None else held.copy()
    owner, place = np.empty(len(new), dtype=np.int64), np.arange(len(new)) - new.bounds[new.sequence]
    for turn in range(int(place.max(initial=-1)) + 1):
        # One token of every sequence that has so many.
        rows = np.flatnonzero(place == turn)
        sequence = new.sequence[rows]
        ranks = (sequence + new.slot[rows] + np.arange(size)[:, None]) % size
        fewest = counts[ranks, sequence].argmin(0)
        owner[rows] = rank = ranks[fewest, np.arange(len(rows))]
        counts[rank, sequence] += 1
    shards = _select(new, owner, size)
    return Layout(shards, shards)


def replicated(new: TokenBlock, size: int, held: IntArray | None = None) -> Layout:
    """Every rank computes every token; the KV is dealt out as by `round_robin`, of many tokens as by `balanced`."""
    most = int(np.diff(new.bounds).max(initial=0))
    spread = balanced if most >= 2 * size else round_robin
    return replace(spread(new, size, held), tokens=(new,) * size, replicated=True)
