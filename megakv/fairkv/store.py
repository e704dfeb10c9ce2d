"""A layer's keys and values where every KV head of every sequence keeps its own number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from megakv.attention.part import Part
from megakv.cache.stores import DenseStore
from megakv.distributed.sharding import IntArray
from megakv.fairkv.attention import RaggedPart
from megakv.fairkv.divided import Dealt, DividedStore, Pair
from megakv.fairkv.pages import RaggedBody
from megakv.fairkv.splitting import HeadShares
from megakv.tensor_files import StreamedTensor

if TYPE_CHECKING:
    from megakv.attention.method import AttentionCall
    from megakv.distributed.sharding import TokenBlock

LEAST_GROWTH = 2
"""Rows that a full buffer of new tokens grows by at least: few, since what was kept may be few too."""


@dataclass(frozen=True)
class Span:
    """Rows, from `start` to before `stop`, compressed together, and what is left of them; None for nothing."""

    start: int
    stop: int
    body: RaggedBody | None

    def below(self, row: int) -> Span:
        """The rows before one that lies behind the start."""
        return Span(self.start, min(self.stop, row), self.body and self.body.below(row))


class RaggedStore:
    """Compressed tokens in pages, and all others, of any turn, as dense keys and values (see `KVStore`).

    Tokens that were not compressed belong to all heads alike, so they need no pages. Tokens are named by their row
    among all tokens that this rank was ever given of the sequence: the table of tokens maps rows to slots. `shares`
    says how this rank shares its KV heads with others.
    """

    def __init__(self, batch: int, shares: HeadShares | None = None):
        self._spans: list[tuple[Span, ...]] = [()] * batch
        self._dense = DenseStore(batch, LEAST_GROWTH) if shares is None else DividedStore(batch, shares, LEAST_GROWTH)

    def begin(self, *, complete: bool, turn: bool = False, ends: bool = True) -> None:
        """A pass begins; see `DividedStore`."""
        if isinstance(self._dense, DividedStore):
            self._dense.begin(complete=complete, turn=turn, ends=ends)

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """See `KVStore`."""
        self._dense.append(sequence, k_KSD, v_KSD)

    def fill(self, sequence: int, slots: IntArray, alone: Pair | None, shared: dict[int, Dealt]) -> None:
        """Take what was saved of tokens that were not compressed; see `DividedStore`."""
        assert isinstance(self._dense, DividedStore)
        self._dense.fill(sequence, slots, alone, shared)

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVStore`."""
        return self._dense.reserve(sequence, rows, k_KSD, v_KSD)

    def part(self, sequence: int) -> tuple[Tensor, Tensor]:
        """``[K, n, D]`` and ``[K, n, Dv]`` of the tokens that are not compressed."""
        return self._dense.part(sequence)

    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        """See `KVStore`."""
        for body in self.bodies(sequence):
            yield RaggedPart(sequence, body, slots, positions)
        if self._dense.rows(sequence):
            yield from self._dense.parts(
                sequence, self._uncompressed(sequence, slots), self._uncompressed(sequence, positions)
            )

    def _uncompressed(self, sequence: int, values: IntArray) -> IntArray:
        """Of values for all rows, those of the rows that are not compressed."""
        edges = [0, *(edge for span in self._spans[sequence] for edge in (span.start, span.stop)), len(values)]
        runs = [values[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
        # One run, the usual case, is not copied.
        return runs[0] if len(runs) == 1 else np.concatenate([values[:0], *runs])

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> None:
        """Nothing lies elsewhere."""

    def release(self) -> None:
        """See `KVStore`."""
        self._dense.release()

    def compress(self, sequence: int, keep_KS: Tensor) -> None:
        """Of a sequence's latest tokens keep what ``[K, n]`` says of the last n, and free the others."""
        count = keep_KS.shape[1]
        if not count:
            return
        before = self._dense.rows(sequence) - count
        start = before + sum(span.stop - span.start for span in self._spans[sequence])
        keys, values = self._dense.part(sequence)
        last = slice(keys.shape[1] - count, None)
        body = RaggedBody.kept(keys[:, last], values[:, last], keep_KS, np.arange(start, start + count))
        del keys, values
        self.add_span(sequence, Span(start, start + count, body))
        self._dense.shrink(sequence, before)

    def add_span(self, sequence: int, span: Span) -> None:
        """Put compressed tokens behind those that are there."""
        self._spans[sequence] += (span,)

    def bodies(self, sequence: int) -> tuple[RaggedBody, ...]:
        """What is kept of the compressed tokens, oldest first."""
        return tuple(span.body for span in self._spans[sequence] if span.body is not None)

    def kept(self, sequence: int) -> IntArray:
        """See `KVStore`."""
        counts = [body.counts for body in self.bodies(sequence)]
        if self._dense.rows(sequence):
            counts.append(self._dense.kept(sequence))
        return np.sum(counts, axis=0) if counts else np.empty(0, dtype=np.int64)

    def saved(self, sequence: int, slots: IntArray) -> dict[str, StreamedTensor]:
        """See `KVStore`: beside what is dense, the tokens kept by each head, span by span."""
        tensors = self._dense.saved(sequence, self._uncompressed(sequence, slots))
        for number, span in enumerate(self._spans[sequence]):
            if span.body is not None:
                found = span.body.saved(slots)
                tensors |= {f"kept{number}.{name}": tensor for name, tensor in found.items()}
        return tensors

    def crop(self, lengths: list[int]) -> None:
        """See `KVStore`. Of a span that is cut, what was kept before the cut stays."""
        dense = []
        for sequence, length in enumerate(lengths):
            spans = tuple(span.below(length) for span in self._spans[sequence] if span.start < length)
            self._spans[sequence] = spans
            dense.append(length - sum(span.stop - span.start for span in spans))
        self._dense.crop(dense)

    def reorder(self, index: list[int]) -> None:
        """See `KVStore`."""
        self._spans = [self._spans[source] for source in index]
        self._dense.reorder(index)

    def fork(self) -> RaggedStore:
        """See `KVStore`."""
        twin = RaggedStore(0)
        twin._spans = list(self._spans)
        twin._dense = self._dense.fork()
        return twin

    def nbytes(self) -> int:
        """See `KVStore`; bodies that several sequences share count once."""
        bodies = {id(body): body for sequence in range(len(self._spans)) for body in self.bodies(sequence)}
        return self._dense.nbytes() + sum(body.nbytes() for body in bodies.values())
