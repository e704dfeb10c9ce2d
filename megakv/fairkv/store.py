"""A layer's keys and values where every KV head of every sequence keeps its own number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from megakv.attention.part import Part
from megakv.fairkv.attention import RaggedPart
from megakv.fairkv.pages import RaggedBody
from megakv.sharding import IntArray
from megakv.stores import DenseStore

LEAST_GROWTH = 2
"""Rows that a full buffer of new tokens grows by at least: few, since what was kept may be few too."""


class RaggedStore:
    """Compressed tokens in pages, and behind them, dense, what was appended since (see `megakv.stores.KVStore`).

    New tokens belong to all heads alike, so they need no pages until they are compressed in turn. Tokens are named by
    their row among all tokens that this rank was ever given of the sequence: the table of tokens maps rows to slots.

    Parameters
    ----------
    batch : int
        Number of sequences.
    """

    def __init__(self, batch: int):
        self._bodies: list[tuple[RaggedBody, ...]] = [()] * batch
        self._tail = DenseStore(batch, LEAST_GROWTH)
        # Rows that came before the tail, kept or not.
        self._past = [0] * batch

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """See `KVStore`."""
        self._tail.append(sequence, k_KSD, v_KSD)

    def part(self, sequence: int) -> tuple[Tensor, Tensor]:
        """``[K, n, D]`` and ``[K, n, Dv]`` of the tokens that are not compressed yet."""
        return self._tail.part(sequence)

    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        """See `KVStore`."""
        past = self._past[sequence]
        for body in self._bodies[sequence]:
            yield RaggedPart(sequence, body, slots, positions)
        if self._tail.rows(sequence):
            yield from self._tail.parts(sequence, slots[past:], positions[past:])

    def tail_rows(self, sequence: int) -> int:
        """Tokens that are not compressed yet."""
        return self._tail.rows(sequence)

    def compress(self, sequence: int, keep_KS: Tensor) -> None:
        """Keep a part of the tokens that are not compressed yet, and free the others.

        Parameters
        ----------
        sequence : int
        keep_KS : Tensor
            ``[K, n]`` bool, what each head keeps.
        """
        count = self._tail.rows(sequence)
        if not count:
            return
        rows = np.arange(self._past[sequence], self._past[sequence] + count)
        body = RaggedBody.kept(*self._tail.part(sequence), keep_KS, rows)
        self.add_body(sequence, body, count)
        self._tail.drop(sequence)

    def add_body(self, sequence: int, body: RaggedBody | None, rows: int) -> None:
        """Put compressed tokens, what is left of `rows` ones, behind those that are there."""
        self._bodies[sequence] += () if body is None else (body,)
        self._past[sequence] += rows

    def bodies(self, sequence: int) -> tuple[RaggedBody, ...]:
        """The compressed tokens, oldest first."""
        return self._bodies[sequence]

    def kept(self, sequence: int) -> IntArray:
        """``[K]`` tokens that each head holds; empty where nothing is held."""
        tail = self._tail.rows(sequence)
        counts = [body.counts for body in self._bodies[sequence]]
        if tail:
            counts.append(np.full(self._tail.part(sequence)[0].shape[0], tail, dtype=np.int64))
        return np.sum(counts, axis=0) if counts else np.empty(0, dtype=np.int64)

    def crop(self, lengths: list[int]) -> None:
        """See `KVStore`. Tokens of a compressed part that come later are forgotten, the others are what was kept."""
        self._tail.crop([max(length - past, 0) for length, past in zip(lengths, self._past, strict=True)])
        for sequence, length in enumerate(lengths):
            if length < self._past[sequence]:
                left: Sequence[RaggedBody | None] = [body.below(length) for body in self._bodies[sequence]]
                self._bodies[sequence] = tuple(body for body in left if body is not None)
                self._past[sequence] = length

    def reorder(self, index: list[int]) -> None:
        """See `KVStore`."""
        self._bodies = [self._bodies[source] for source in index]
        self._past = [self._past[source] for source in index]
        self._tail.reorder(index)

    def fork(self) -> RaggedStore:
        """See `KVStore`."""
        twin = RaggedStore(0)
        twin._bodies, twin._past = list(self._bodies), list(self._past)
        twin._tail = self._tail.fork()
        return twin

    def nbytes(self) -> int:
        """See `KVStore`; bodies that several sequences share count once."""
        bodies = {id(body): body for bodies in self._bodies for body in bodies}
        return self._tail.nbytes() + sum(body.nbytes() for body in bodies.values())
