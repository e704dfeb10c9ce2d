"""The store of one layer whose rows lie in tiers off the accelerator.

Beside what every store does, it brings rows before its layer's attention, leaves some of them to the host, and keeps
the rows of a turn that may be compressed on the accelerator until that ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megakv.attention.method import AttentionCall, PartElsewhere
from megakv.attention.partial import KVPart, Part
from megakv.base.tensor_files import StreamedTensor
from megakv.cache.ragged_body import Body, RaggedBody
from megakv.cache.store import Pair, SpanStore
from megakv.distributed.sharding import IntArray, TokenBlock, TokenColumn
from megakv.offload.staging import StagedLayer
from megakv.offload.tiered_rows import StoreEngine, TieredRows


class Strip(NamedTuple):
    """KV heads of a layer, all if `heads` is None, whose rows are in one tier; all of a sequence's that are not
    compressed, or those that its column of `rows` numbers."""

    store: TieredStore
    heads: slice | None = None
    rows: Sequence[TokenColumn] | None = None

    def numbers(self, sequence: int, values: IntArray) -> IntArray:
        """Of values for all rows, those for the tier's."""
        return values if self.rows is None else values[self.rows[sequence].view()]

    def before(self, sequence: int, count: int) -> int:
        """How many of the tier's rows are among so many first ones."""
        return count if self.rows is None else int(np.searchsorted(self.rows[sequence].view(), count))


class TieredStore(TieredRows, SpanStore):
    """Rows in tiers as a store of their layer.

    While the layer is at work, `staged` is what was brought of the group of sequences that is attended to.
    """

    def __init__(self, layer: int, batch: int, engine: StoreEngine, part: float = 1.0):
        super().__init__(layer, batch, engine, part)
        self.staged: StagedLayer | None = None
        # While the layer is at work: tokens of every sequence when it began, and what has come since, with the
        # sequences that equal parts of it belong to, and the index of each one's first row.
        self._before: list[int] | None = None
        self._new: list[tuple[Sequence[int], list[int], Tensor]] = []
        # New rows of a sequence that stay on the accelerator: until the layer's attention is over, or, where the turn
        # is open, until that ends.
        self._held: dict[int, Tensor] = {}
        # The blocks that those begin, with room behind them.
        self._room: dict[int, Tensor] = {}
        self._open = self._ends = False

    # As a KVStore

    def begin(self, *, complete: bool, turn: bool = False, ends: bool = True) -> None:
        # What came before the last piece of a turn stays before it, also if no row proves long enough.
        self._open, self._ends = turn or bool(self._held), ends

    def append(self, sequence: int | Sequence[int], k_KSD: Tensor, v_KSD: Tensor) -> None:
        if self._open:
            super().append(sequence, k_KSD, v_KSD)
        else:
            self.append_each(sequence if isinstance(sequence, Sequence) else [sequence], k_KSD, v_KSD)

    def append_shared(self, sequence: int, runs: Sequence[Pair]) -> None:
        for pair in runs:
            keys, values = (tensor.to(self.engine.device) for tensor in pair)
            self.append(sequence, keys, values)
        self.flush()

    def append_each(self, sequences: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> None:
        """Add equal numbers of rows behind those of some sequences."""
        self._take(sequences, self.rows_of(k_KLD, v_KLD))

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        """On the accelerator until the layer's attention is over, or the turn: they leave in one block."""
        self.set_format(k_KSD, v_KSD)
        held = self._held.get(sequence)
        before = 0 if held is None else len(held)
        block = self._room.get(sequence)
        if block is None or len(block) < before + rows:
            # A turn may come in many pieces: what is there is copied few times.
            more = before // 2 if self._open else 0
            block = torch.empty((before + rows + more, self.row_width), dtype=self.dtype, device=k_KSD.device)
            if held is not None:
                block[:before] = held
        places = block[before : before + rows]
        if self._open:
            self.engine.expect(self)
        else:
            self._new.append(([sequence], [self.rows(sequence)], places))
        self._held[sequence], self._room[sequence] = block[: before + rows], block
        return self.heads_of(places)

    def _take(self, sequences: Sequence[int], rows: Tensor) -> None:
        """Add equal numbers of rows ``[n, W]`` behind those of some sequences."""
        firsts = self._extend(sequences, rows)
        if self._before is not None:
            self._new.append((sequences, firsts, rows))
            self.put_new(self._new[-1:])

    def part(self, sequence: int) -> Pair:
        """An open turn's rows, where there are some."""
        held = self._held.get(sequence)
        return self._others(sequence) if held is None or not self._open else self.heads_of(held)

    def _others(self, sequence: int) -> Pair:
        self.flush()
        staged, gone = self.staged, self.gone(sequence)
        if staged is not None:
            staged.await_streamed()
            at = staged.starts[sequence]
            return self.heads_of(staged.rows[at : staged.row(sequence, self._length(sequence))])
        for sequences, firsts, rows in self._new:
            if sequence in sequences and firsts[index := sequences.index(sequence)] == gone:
                return self.heads_of(rows.chunk(len(sequences))[index])
        return self.heads_of(self.brought_now(sequence))

    def runs(self, sequence: int) -> Sequence[Pair]:
        if not self._open or sequence not in self._held:
            return [self.part(sequence)] if self.rows(sequence) > self.gone(sequence) else []
        before = [self._others(sequence)] if self._length(sequence) > self.gone(sequence) else []
        return [*before, self.part(sequence)]

    def parts(self, sequence: int, slots: IntArray, positions: IntArray) -> Iterator[Part]:
        if runs := self.runs(sequence):
            # In one piece: they may travel.
            keys, values = runs[0] if len(runs) == 1 else (torch.cat(each, dim=1) for each in zip(*runs, strict=True))
            here = slice(len(slots) - keys.shape[1], None)
            yield KVPart(sequence, keys, values, slots[here], positions[here])

    def share(self, sequence: int, first: int, last: int) -> Sequence[Pair]:
        """A copy in host memory: pages are written again once they were given back."""
        self.flush()
        if first == last:
            return ()
        runs = [self.unpacked(run) for _, run in self.rows_in_memory(sequence, last, first)]
        return (self.heads_of(torch.cat([runs[0].clone() if len(runs) == 1 else runs[0], *runs[1:]])),)

    def kept(self, sequence: int) -> IntArray:
        rows = self.rows(sequence) - self.gone(sequence)
        return np.full(self.head_shape.heads if rows else 0, rows, dtype=np.int64)

    def packed(self) -> tuple[Tensor, Tensor, list[int], list[int]] | None:
        staged = self.staged
        if staged is None or self._open:
            return None
        self.flush()
        staged.await_streamed()
        counts = [
            length - away if sequence in staged.group else 0
            for sequence, (length, away) in enumerate(zip(self.lengths(), staged.away, strict=True))
        ]
        return *self.heads_of(staged.rows), staged.starts, counts

    def save(self, sequence: int, slots: IntArray) -> dict[str, StreamedTensor]:
        """From where the rows lie, without the accelerator."""
        self.flush()
        first, last = self.gone(sequence), self._length(sequence)
        if first == last:
            return {}
        shape = self.head_shape

        def heads(kind: int) -> Iterator[Tensor]:
            runs = [self.heads_of(self.unpacked(run))[kind] for _, run in self.rows_in_memory(sequence, last, first)]
            for head in range(shape.heads):
                yield from (run[head] for run in runs)

        return {
            name: StreamedTensor((shape.heads, last - first, dim), self.dtype, partial(heads, kind))
            for kind, (name, dim) in enumerate((("k", shape.key_dim), ("v", shape.value_dim)))
        }

    def rows(self, sequence: int) -> int:
        held = self._held.get(sequence)
        return self._rows[sequence].length + (0 if held is None else len(held))

    def _length(self, sequence: int) -> int:
        """Rows without those of an open turn."""
        return self._rows[sequence].length if self._open else self.rows(sequence)

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> PartElsewhere | None:
        return self.engine.attend_on_host(self.strips, call, q_HLD, tokens)

    def crop(self, sequence: int, length: int) -> None:
        """Rows in tiers are left as they are, and what was brought of them, where those that are cut are held here."""
        before = self._rows[sequence].length
        self._room.pop(sequence, None)
        if (held := self._held.pop(sequence, None)) is not None and length > before:
            self._held[sequence] = held[: length - before].clone()
        if length < before:
            self.abandon()
            self.version += 1
            self._truncate(sequence, length)
        # Keys and values that found no room have left activations behind.
        self._inputs[sequence].truncate(min(length, before))

    def abandon(self) -> None:
        """End the layer's work at once, with nothing of what was brought or is to come for it."""
        self.flush()
        self.staged = None
        self._leave()
        self._offered.clear()

    def reorder(self, index: list[int]) -> None:
        if index != [*self.sequences]:
            self.flush()
            self._held = {row: self._held[source] for row, source in enumerate(index) if source in self._held}
            self._room.clear()
            self._reorder(index)

    def fork(self) -> TieredStore:
        self.flush()
        twin = TieredStore(self.layer, len(self.sequences), self.engine)
        twin._share_rows_of(self)
        twin._held, twin._open = dict(self._held), self._open
        # Neither writes behind what both hold.
        self._room.clear()
        return twin

    def finish(self) -> None:
        self._room.clear()
        for sequence in () if self._open else list(self._held):
            self._take([sequence], self._held.pop(sequence))
        self.flush()
        if self._leave():
            self.engine.leave(self)
        # A turn's rows need no place where the layer attends: they follow when it has.
        for sequence in list(self._held if self._ends else ()):
            self._take([sequence], self._held.pop(sequence))
            self.flush()

    def _leave(self) -> bool:
        """The layer is not at work any more; whether it was."""
        working, self._before = self._before is not None, None
        self._new.clear()
        return working

    def nbytes(self) -> int:
        return super().nbytes() + sum(held.nbytes for held in self._held.values())

    # For the stores beside it

    @property
    def tier(self) -> TieredStore:
        """Itself: what lies around it has one, too."""
        return self

    @property
    def strips(self) -> list[Strip]:
        """Strips of the layer: one."""
        return [Strip(self)]

    def leaves(self, body: Body) -> bool:
        """Whether a body is left to the host while the layer is at work."""
        return self.staged is not None and body in self.staged.left

    def brought(self, body: Body) -> RaggedBody | None:
        """A body on the accelerator while the layer is at work; None where it was not brought for it."""
        staged = self.staged
        if staged is None or body not in staged.bodies:
            return None
        staged.await_streamed()
        return staged.bodies[body]

    # For the engine

    def enter(self) -> None:
        """The store's layer is at work from now on."""
        self._before = self.lengths()

    def pause(self) -> None:
        """Another group of sequences is at work in the layer: what came of the one before need not stay here."""
        self.flush()
        self._new.clear()

    def lengths(self) -> list[int]:
        """Tokens of every sequence, without those of an open turn."""
        found = super().lengths()
        for sequence, held in () if self._open else self._held.items():
            found[sequence] += len(held)
        return found

    def cached_before_step(self) -> list[int]:
        """Tokens of every sequence, without those of the pass under way while its layer is at work."""
        return self.lengths() if self._before is None else self._before

    def put_new(self, new: Sequence[tuple[Sequence[int], list[int], Tensor]] | None = None) -> None:
        """Write rows of the pass under way, all or some, into the buffer of the group that is attended to, if any."""
        staged = self.staged
        if staged is None:
            return
        for sequences, firsts, rows in self._new if new is None else new:
            inside = [index for index, sequence in enumerate(sequences) if sequence in staged.group]
            if inside:
                span, each = slice(inside[0], inside[-1] + 1), len(rows) // len(sequences)
                staged.put(sequences[span], firsts[span], rows[each * span.start : each * span.stop])

    def move_residents(self, staged: StagedLayer) -> None:
        """Move the resident rows of sequences that have grown: all behind those that stay away are in the buffer."""
        for sequence in self.residents.take_grown(staged.group):
            if staged.streamed is not None:
                staged.await_streamed()
            first = staged.away[sequence]
            rows = staged.rows[staged.row(sequence, first) : staged.row(sequence, self._length(sequence))]
            self.residents.move(sequence, first, rows)
