"""A layer's keys and values where every KV head of every sequence keeps its own number of tokens.

Beside the verbs of every store: `compress` keeps of a sequence's latest tokens only some in each head, and `replace`
puts some of what is held in the place of everything. `attend_together` attends to bodies of several sequences at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from megakv.attention.partial import Part
from megakv.base.device import upload
from megakv.base.tensor_files import StreamedTensor
from megakv.cache.joined_bodies import join
from megakv.cache.ragged_attention import AttendedBody, RaggedPart
from megakv.cache.ragged_body import Body, RaggedBody
from megakv.cache.saved import SavedLayer
from megakv.cache.store import KVStore, Pair, TurnStore
from megakv.cache.together import attend_heads
from megakv.distributed.sharding import IntArray

if TYPE_CHECKING:
    from megakv.attention.method import AttentionCall, PartElsewhere
    from megakv.attention.reference import Scoring
    from megakv.distributed.sharding import TokenBlock

Rotate = Callable[[Tensor, int], Tensor]
"""Keys ``[n, D]`` of tokens so many positions further on."""


class Move(NamedTuple):
    """Tokens before the row `before`, all at slots before `slot`, count as if they stood `shift` positions further on,
    where what lay between them and the others is gone.
    """

    shift: int
    before: int
    slot: int


class Moved(NamedTuple):
    """A `Move` that took place, and the `keys` ``[n, D]`` of its tokens as they were, head after head."""

    shift: int
    before: int
    slot: int
    keys: Tensor


@dataclass(frozen=True)
class Span:
    """Rows, from `start` to before `stop`, compressed together, and what is left of them; None for nothing."""

    start: int
    stop: int
    body: Body | None
    moved: Moved | None = None

    def below(self, row: int) -> Span:
        """The rows before one that lies behind the start."""
        if row >= self.stop:
            return self
        # What lay before a gap is whole where the cut is behind it, as it must be.
        return Span(self.start, row, self.body and self.body.below(row), self.moved)

    def original(self, body: RaggedBody) -> tuple[Tensor, Tensor, IntArray]:
        """Of its body, on the accelerator, what `RaggedBody.flat` gives, with keys as they were."""
        keys, values, rows = body.flat()
        if self.moved is not None:
            keys = keys.clone()
            keys[upload(np.flatnonzero(rows < self.moved.before), keys.device)] = self.moved.keys
        return keys, values, rows

    def moved_on(self, move: Move, rotate: Rotate) -> Span:
        """With original keys moved on."""
        if self.body is None or not move.shift:
            return self
        keys, values, rows = self.body.here().flat()
        where = upload(np.flatnonzero(rows < move.before), keys.device)
        was = keys[where]
        body = RaggedBody.packed(keys, values, self.body.counts, rows)
        assert body is not None
        body.k_nD[where] = rotate(was, move.shift)
        return Span(self.start, self.stop, body, Moved(*move, was))

    def saved(self, slots: IntArray) -> dict[str, StreamedTensor]:
        """What a file holds of it, given the slots of all rows: keys as they were."""
        if (body := self.body) is None:
            return {}
        tensors = body.saved(slots)
        if self.moved is not None:
            tensors["k"] = replace(tensors["k"], pieces=lambda: iter(self.original(body.here())[:1]))
        return tensors

    def nbytes(self) -> int:
        return (self.body.nbytes() if self.body else 0) + (self.moved.keys.nbytes if self.moved else 0)


class RaggedStore(KVStore):
    """Compressed tokens in bodies, and all others, of any turn, in a store of their own.

    Tokens that were not compressed belong to all heads alike, so they need none. Their rows in the inner store
    count nothing that was compressed. `rotate` moves keys of this layer on.
    """

    def __init__(self, batch: int, inner: TurnStore, rotate: Rotate | None = None):
        self._spans: list[tuple[Span, ...]] = [()] * batch
        self._inner, self._rotate = inner, rotate
        # Names of the bodies at the begin of the pass before.
        self._before: list[int] = []

    def begin(self, *, complete: bool, turn: bool = False, ends: bool = True) -> None:
        self._join()
        self._inner.begin(complete=complete, turn=turn, ends=ends)

    def append(self, sequence: int | Sequence[int], k_KSD: Tensor, v_KSD: Tensor) -> None:
        self._inner.append(sequence, k_KSD, v_KSD)

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        return self._inner.reserve(sequence, rows, k_KSD, v_KSD)

    def part(self, sequence: int) -> Pair:
        """Tokens of the turn, which are not compressed yet, in one piece."""
        return self._inner.part(sequence)

    def runs(self, sequence: int) -> Sequence[Pair]:
        """Tokens that are not compressed."""
        return self._inner.runs(sequence)

    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        yield from self._kept_parts(sequence, slots, positions, self._here)
        if self._inner.rows(sequence):
            uncompressed = (self._uncompressed(sequence, each) for each in (slots, positions))
            yield from self._inner.parts(sequence, *uncompressed)

    def _kept_parts(
        self, sequence: int, slots: IntArray, positions: IntArray, here: Callable[[Body], AttendedBody | None]
    ) -> Iterator[RaggedPart]:
        for span in self._spans[sequence]:
            if span.body is not None and (found := here(span.body)) is not None:
                moved = (span.moved.shift, span.moved.before) if span.moved else (0, 0)
                yield RaggedPart(sequence, found, slots, positions, moved)

    def _uncompressed(self, sequence: int, values: IntArray) -> IntArray:
        """Of values for all rows, those of the rows that are not compressed."""
        edges = [0, *(edge for span in self._spans[sequence] for edge in (span.start, span.stop)), len(values)]
        runs = [values[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
        # One run, the usual case, is not copied.
        return runs[0] if len(runs) == 1 else np.concatenate([values[:0], *runs])

    def packed(self) -> tuple[Tensor, Tensor, list[int], list[int]] | None:
        return None if any(self._spans) else self._inner.packed()

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> PartElsewhere | None:
        return self._inner.attend_elsewhere(call, q_HLD, tokens)

    def attend_together(
        self, q_HLD: Tensor, tokens: TokenBlock, scoring: Scoring, parts: Sequence[Part]
    ) -> tuple[Tensor, Tensor, list[Part]] | None:
        return attend_heads(q_HLD, tokens, scoring, parts)

    def _join(self) -> None:
        """Bring bodies that stay for more than a pass to where one call of a CUDA kernel takes them all."""
        bodies = [body for sequence in range(len(self._spans)) for body in self.bodies(sequence)]
        before, self._before = self._before, list(map(id, bodies))
        if self._before == before and (together := join(bodies)) is not None:
            found = iter(together)
            self._spans = [
                tuple(replace(span, body=span.body and next(found)) for span in spans) for spans in self._spans
            ]

    def compress(self, sequence: int, keep_KS: Tensor) -> None:
        """Of a sequence's latest tokens keep what ``[K, n]`` says of the last n, and free the others."""
        count = keep_KS.shape[1]
        if not count:
            return
        start = self.rows(sequence) - count
        keys, values = self._inner.part(sequence)
        last = slice(keys.shape[1] - count, None)
        body = RaggedBody.kept(keys[:, last], values[:, last], keep_KS, np.arange(start, start + count))
        del keys, values
        self.add_span(sequence, Span(start, start + count, body))
        self._inner.release(sequence, count)

    def pieces(self, sequence: int) -> Iterator[tuple[int, Tensor, Tensor, IntArray]]:
        for span in self._spans[sequence]:
            if span.body is not None:
                bounds = np.cumsum(span.body.counts)[:-1].tolist()
                keys, values, rows = span.original(self._here(span.body) or span.body.here())
                heads = (*(each.tensor_split(bounds) for each in (keys, values)), np.split(rows, bounds))
                yield from zip(range(len(bounds) + 1), *heads, strict=True)
        places = self._uncompressed(sequence, np.arange(self.rows(sequence)))
        for head, keys, values, rows in self._inner.pieces(sequence):
            yield head, keys, values, places[rows]

    def replace(
        self, sequence: int, keys: Tensor, values: Tensor, counts: IntArray, rows: IntArray, move: Move | None = None
    ) -> None:
        """Of all rows so far hold these ``[n]`` alone, head after head of ``[K]`` counts, in ``[n, D]`` and so on."""
        stop = self.rows(sequence)
        body = RaggedBody.packed(keys, values, counts, rows)
        self._spans[sequence] = ()
        self._inner.release(sequence, self._inner.rows(sequence))
        if stop:
            self.add_span(sequence, Span(0, stop, body), move)

    def add_span(self, sequence: int, span: Span, move: Move | None = None) -> None:
        """Put compressed tokens behind those that are there; of its keys, as they were, some may move."""
        if move is not None:
            if self._rotate is None:
                raise ValueError("its tokens count by their place in the cache, which this engine cannot do")
            span = span.moved_on(move, self._rotate)
        self._spans[sequence] += (replace(span, body=span.body and self._keep(span.body)),)

    def _keep(self, body: Body) -> Body:
        """The body that stays in the place of one that may just have been made."""
        return body

    def _here(self, body: Body) -> RaggedBody | None:
        """A body's tokens, for attention; None where `attend_elsewhere` attends to them."""
        return body.here()

    def bodies(self, sequence: int) -> tuple[Body, ...]:
        """What is kept of the compressed tokens, oldest first."""
        return tuple(span.body for span in self._spans[sequence] if span.body is not None)

    def finish(self) -> None:
        self._inner.finish()

    def forget(self, sequence: int, rows: int) -> None:
        """Compressed tokens go when all that were compressed together do."""
        spans = self._spans[sequence]
        self._inner.forget(sequence, rows - sum(max(0, min(span.stop, rows) - span.start) for span in spans))
        self._spans[sequence] = tuple(Span(s.start, s.stop, None) if s.stop <= rows else s for s in spans)

    def crop(self, sequence: int, length: int) -> None:
        """Of a span that is cut, what was kept before the cut stays."""
        spans = self._spans[sequence] = tuple(s.below(length) for s in self._spans[sequence] if s.start < length)
        # Only now that what was cut has given up its place.
        self._spans[sequence] = tuple(replace(span, body=span.body and self._keep(span.body)) for span in spans)
        self._inner.crop(sequence, length - self._compressed(sequence))

    def reorder(self, index: list[int]) -> None:
        self._spans = [self._spans[source] for source in index]
        self._inner.reorder(index)

    def fork(self) -> RaggedStore:
        twin = type(self)(0, cast(TurnStore, self._inner.fork()), self._rotate)
        twin._spans = list(self._spans)
        return twin

    def save(self, sequence: int, slots: IntArray) -> dict[str, StreamedTensor]:
        """Beside what is not compressed, the tokens kept by each head, span by span."""
        tensors = self._inner.save(sequence, self._uncompressed(sequence, slots))
        for number, span in enumerate(self._spans[sequence]):
            tensors |= {f"kept{number}.{name}": tensor for name, tensor in span.saved(slots).items()}
            if span.moved is not None:
                tensors["moved"] = StreamedTensor.of(torch.tensor([span.moved.shift, span.moved.slot]))
        return tensors

    def load(self, sequence: int, saved: SavedLayer) -> None:
        slots, found, moved = saved.tokens.slots, saved.kept(), saved.moved()
        move = None if moved is None else Move(moved[0], int(np.searchsorted(slots, moved[1])), moved[1])
        for span in saved.tokens.compressed:
            start, stop = map(int, np.searchsorted(slots, span))
            if stop == start:
                continue
            body = None
            if found is not None:
                inside = np.flatnonzero((found.slot >= span[0]) & (found.slot < span[1]))
                counts = np.bincount(found.head[inside], minlength=len(saved.own)).astype(np.int64)
                index, rows = upload(inside, found.keys.device), np.searchsorted(slots, found.slot[inside])
                body = RaggedBody.packed(found.keys[index], found.values[index], counts, rows)
            self.add_span(sequence, Span(start, stop, body), move)
        self._inner.load(sequence, saved.uncompressed())

    def _compressed(self, sequence: int) -> int:
        return sum(span.stop - span.start for span in self._spans[sequence])

    def rows(self, sequence: int) -> int:
        return self._inner.rows(sequence) + self._compressed(sequence)

    def kept(self, sequence: int) -> IntArray:
        counts = [body.counts for body in self.bodies(sequence)]
        if len(own := self._inner.kept(sequence)):
            counts.append(own)
        return np.sum(counts, axis=0) if counts else np.empty(0, dtype=np.int64)

    def nbytes(self) -> int:
        """Bodies that several sequences share count once."""
        spans = {id(span.body): span for spans in self._spans for span in spans if span.body is not None}
        return self._inner.nbytes() + sum(span.nbytes() for span in spans.values())
