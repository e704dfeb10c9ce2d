"""The store of one layer whose rows lie in tiers off the accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megakv.attention.method import AttentionCall, PartElsewhere
from megakv.base.device import upload
from megakv.base.tensor_files import StreamedTensor
from megakv.cache.ragged_body import Body, RaggedBody
from megakv.cache.shares import HeadShares
from megakv.cache.store import KVStore, Pair
from megakv.costmodel.stored_rows import page_bytes
from megakv.distributed.sharding import IntArray, TokenBlock, TokenColumn
from megakv.offload.config import OffloadConfig
from megakv.offload.layer_rows import LayerRows
from megakv.offload.link import Link, Move
from megakv.offload.paged_rows import PagedRows, Runs
from megakv.offload.pages import PagePool
from megakv.offload.residents import LayerResidents, ResidentBudget
from megakv.offload.row_format import RowFormat
from megakv.offload.staging import StagedLayer


class StoreEngine(Protocol):
    """What a store asks of the engine that it belongs to, and tells it (see `Offloader`)."""

    config: OffloadConfig
    link: Link
    pool: PagePool
    device: torch.device
    residents: ResidentBudget

    def expect(self, store: TieredStore) -> None: ...
    def attend_on_host(
        self, strips: Sequence[Strip], call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock
    ) -> PartElsewhere | None: ...
    def leave(self, store: TieredStore) -> None: ...


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


class TieredStore(RowFormat, KVStore):
    """Keys, values and activations of one layer on this rank, per sequence, off the accelerator.

    A token's row holds its keys, then its values, all heads: a run of tokens is one block of memory. `version` goes up
    when rows are cut or change places; `keeps_inputs` says whether activations are wanted, as far as is known. While
    its layer is at work, `staged` is what was brought of the group of sequences that is attended to. Of what stays on
    the accelerator of a layer its rows are a `part`.
    """

    def __init__(self, layer: int, batch: int, engine: StoreEngine, part: float = 1.0):
        super().__init__(engine.config)
        self.layer, self.version, self.keeps_inputs = layer, 0, True
        self.staged: StagedLayer | None = None
        self.engine = engine
        self._rows, self._inputs = (
            LayerRows(PagedRows(engine.pool, layer=layer) for _ in range(batch)) for _ in range(2)
        )
        self._outgoing: list[Move] = []
        self.residents = LayerResidents(engine.residents, layer, [None] * batch, part)
        # By sequence, activations of the tokens that come next: which of a pass's or a group's ``[L, h]``.
        self._offered: dict[int, tuple[Tensor, slice]] = {}
        # While the layer is at work: tokens of every sequence when it began, and what has come since, with the
        # sequences that equal parts of it belong to, and the index of each one's first row.
        self._before: list[int] | None = None
        self._new: list[tuple[Sequence[int], list[int], Tensor]] = []
        # Places of a sequence's new rows that others write to until the layer's attention is over.
        self._reserved: dict[int, Tensor] = {}

    # As a KVStore

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        self.append_each([sequence], k_KSD, v_KSD)

    def append_shared(self, sequence: int, runs: Sequence[Pair]) -> None:
        for pair in runs:
            keys, values = (tensor.to(self.engine.device) for tensor in pair)
            self.append(sequence, keys, values)
        self.flush()

    def append_each(self, sequences: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> None:
        """Also several rows of one sequence."""
        self._take(sequences, self.rows_of(k_KLD, v_KLD))

    def reserve(self, sequence: int, rows: int, k_KSD: Tensor, v_KSD: Tensor) -> Pair:
        """On the accelerator until the layer's attention is over: they come in messages, and leave in one block."""
        self.set_format(k_KSD, v_KSD)
        places = torch.empty((rows, self.row_width), dtype=self.dtype, device=k_KSD.device)
        self._new.append(([sequence], [self.rows(sequence)], places))
        self._reserved[sequence] = places
        return self.heads_of(places)

    def _take(self, sequences: Sequence[int], rows: Tensor) -> None:
        """Add equal numbers of rows ``[n, W]`` behind those of some sequences."""
        lengths, each = self.lengths(), rows.shape[0] // len(sequences)
        firsts = [lengths[sequence] for sequence in sequences]
        stored = rows if self.quantiser is None else self.quantiser.pack(rows)
        smaller = False
        if sequences[0] in self._offered:
            block, span = self._offered[sequences[0]]
            if span.stop - span.start != each:
                # They did not come in one piece.
                del self._offered[sequences[0]]
            else:
                input_bytes, stored_bytes = (each * part.shape[1] * part.itemsize for part in (block, stored))
                # No larger activations can pay, on any machine.
                self.keeps_inputs = self._config.keeps_inputs(input_bytes, stored_bytes)
                smaller = input_bytes < stored_bytes
        self.engine.expect(self)
        if smaller:
            # What is smaller is the better use of memory. Activations of all sequences are there already.
            self._keep_inputs({sequence: lengths[sequence] for sequence in self._offered})
        spans = [slice(each * index, each * (index + 1)) for index in range(len(sequences))]
        self._outgoing += self._rows.extend_each(sequences, stored.contiguous(), spans)
        self._keep_inputs({each: first for each, first in zip(sequences, firsts, strict=True) if each in self._offered})
        self.residents.append_each(sequences, firsts, rows)
        if self._before is not None:
            self._new.append((sequences, firsts, rows))
            self.put_new(self._new[-1:])

    def _keep_inputs(self, firsts: dict[int, int]) -> None:
        offered = {sequence: self._offered.pop(sequence) for sequence in firsts}
        # Only an unbroken run from the first token on can be recomputed. Autocast may give a pass another type.
        unbroken = [
            sequence
            for sequence, first in firsts.items()
            if self.keeps_inputs and offered[sequence][0].dtype == self.dtype and self._inputs[sequence].length == first
        ]
        for _, same in groupby(unbroken, lambda sequence: id(offered[sequence][0])):
            own = list(same)
            spans = [offered[sequence][1] for sequence in own]
            self._outgoing += self._inputs.extend_each(own, offered[own[0]][0], spans)

    def part(self, sequence: int) -> tuple[Tensor, Tensor]:
        self.flush()
        paged, staged = self._rows[sequence], self.staged
        if staged is not None:
            staged.await_streamed()
            at = staged.starts[sequence]
            return self.heads_of(staged.rows[at : staged.row(sequence, self.rows(sequence))])
        for sequences, firsts, rows in self._new:
            if sequence in sequences and firsts[index := sequences.index(sequence)] == self.gone(sequence):
                return self.heads_of(rows.chunk(len(sequences))[index])
        shape = (paged.length - paged.gone, paged.width)
        device = torch.empty(shape, dtype=self.stored_dtype, device=self.engine.device)
        self.engine.link.start("in", paged.moves(paged.gone, device)).wait()
        return self.heads_of(self.unpacked(device))

    def share(self, sequence: int, first: int, last: int) -> Sequence[Pair]:
        """A copy in host memory: pages are written again once they were given back."""
        self.flush()
        if first == last:
            return ()
        runs = [self.unpacked(run) for _, run in self._rows[sequence].runs_in_memory(last, first)]
        return (self.heads_of(torch.cat([runs[0].clone() if len(runs) == 1 else runs[0], *runs[1:]])),)

    def kept(self, sequence: int) -> IntArray:
        rows = self.rows(sequence) - self.gone(sequence)
        return np.full(self.head_shape.heads if rows else 0, rows, dtype=np.int64)

    def packed(self) -> tuple[Tensor, Tensor, list[int], list[int]] | None:
        staged = self.staged
        if staged is None:
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
        rows = self._rows[sequence]
        if rows.length == rows.gone:
            return {}
        shape = self.head_shape

        def heads(kind: int) -> Iterator[Tensor]:
            runs = [self.heads_of(self.unpacked(run))[kind] for _, run in rows.runs_in_memory(rows.length, rows.gone)]
            for head in range(shape.heads):
                yield from (run[head] for run in runs)

        return {
            name: StreamedTensor((shape.heads, rows.length - rows.gone, dim), self.dtype, partial(heads, kind))
            for kind, (name, dim) in enumerate((("k", shape.key_dim), ("v", shape.value_dim)))
        }

    def rows(self, sequence: int) -> int:
        reserved = self._reserved.get(sequence)
        return self._rows[sequence].length + (0 if reserved is None else len(reserved))

    def gone(self, sequence: int) -> int:
        return self._rows[sequence].gone

    def forget(self, sequence: int, rows: int) -> None:
        """What is on the way from pages, or into them, goes on: who takes them next waits for it."""
        self._rows[sequence].forget(rows)
        # Those of rows that never came are nobody's.
        if self._inputs[sequence].known:
            self._inputs[sequence].forget(rows)
        self.residents.forget(sequence, rows)

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> PartElsewhere | None:
        return self.engine.attend_on_host(self.strips, call, q_HLD, tokens)

    def crop(self, sequence: int, length: int) -> None:
        self.flush()
        self._reserved.pop(sequence, None)
        if length < self.rows(sequence):
            self.version += 1
        for paged in (self._rows[sequence], self._inputs[sequence]):
            paged.truncate(length)
        self.residents.crop(sequence, length)
        self._offered.pop(sequence, None)
        self.staged = None
        self._leave()

    def reorder(self, index: list[int]) -> None:
        if index == list(range(len(self._rows))):
            return
        self.flush()
        self.version += 1
        self.residents.reorder(index)
        self._rows, self._inputs = self._rows.fork(index), self._inputs.fork(index)

    def fork(self) -> TieredStore:
        self.flush()
        twin = TieredStore(self.layer, len(self._rows), self.engine)
        twin.take_format_of(self)
        twin.residents = self.residents.fork()
        twin._rows, twin._inputs = self._rows.fork(self.sequences), self._inputs.fork(self.sequences)
        return twin

    def finish(self) -> None:
        for sequence in list(self._reserved):
            self._take([sequence], self._reserved.pop(sequence))
        self.flush()
        if self._leave():
            self.engine.leave(self)

    def _leave(self) -> bool:
        """The layer is not at work any more; whether it was."""
        working, self._before = self._before is not None, None
        self._new.clear()
        return working

    def nbytes(self) -> int:
        return sum(paged.nbytes for paged in (*self._rows, *self._inputs))

    @property
    def rows_per_page(self) -> list[int]:
        """Of keys and values, and of activations, where it holds some."""
        return [paged.per_page for paged in (*self._rows, *self._inputs) if paged.width]

    # For the stores beside it

    @property
    def tier(self) -> TieredStore:
        """Itself: what lies around it has one, too."""
        return self

    @property
    def strips(self) -> list[Strip]:
        """Of the layer."""
        return [Strip(self)]

    @property
    def sequences(self) -> range:
        """Of the batch."""
        return range(len(self._rows))

    def expect(self, k_KSD: Tensor, v_KSD: Tensor) -> None:
        """Keys and values like these will come, or what is kept of them."""
        self.set_format(k_KSD, v_KSD)
        self.engine.expect(self)

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

    def offer(self, stored: TokenBlock, hidden_LE: Tensor, kept: IntArray | None) -> None:
        """Take the activations ``[L, h]`` of the tokens that are appended next: those at `kept`, or all."""
        if kept is None:
            # A copy: the model may go on to work on its own tensor in place.
            block = hidden_LE.clone(memory_format=torch.contiguous_format)
        else:
            block = hidden_LE[upload(kept, hidden_LE.device)].contiguous()
        for sequence, (first, last) in enumerate(pairwise(stored.bounds.tolist())):
            if last > first:
                self._offered[sequence] = block, slice(first, last)

    def flush(self) -> None:
        """Send what was appended to its tier: new tokens only."""
        if self._outgoing:
            self.engine.link.start("out", self._outgoing)
            self._outgoing = []

    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        # Every layer of every step asks for them several times.
        found = [paged.length for paged in self._rows]
        for sequence, places in self._reserved.items():
            found[sequence] += len(places)
        return found

    def cached_before_step(self) -> list[int]:
        """Tokens of every sequence, without those of the pass under way while its layer is at work."""
        return self.lengths() if self._before is None else self._before

    def put_new(self, new: Sequence[tuple[Sequence[int], list[int], Tensor]] | None = None) -> None:
        """Write rows of the pass under way, all or some, into the buffer of the group that is attended to, if any."""
        staged = self.staged
        for sequences, firsts, rows in () if staged is None else self._new if new is None else new:
            assert staged is not None
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
            rows = staged.rows[staged.row(sequence, first) : staged.row(sequence, self.rows(sequence))]
            self.residents.move(sequence, first, rows)

    def with_inputs(self) -> list[int]:
        """Leading tokens of every sequence whose activations are kept, up to those that are resident."""
        return self.residents.before([paged.length for paged in self._inputs])

    @property
    def input_width(self) -> int:
        """Elements of a token's activations; 0 where none are kept."""
        return max((paged.width for paged in self._inputs), default=0)

    @property
    def input_bytes(self) -> int:
        """Bytes of a token's activations; 0 where none are kept."""
        return self.input_width and self.input_width * self.dtype.itemsize

    def moves(self, block: Tensor, runs: Sequence[tuple[int, int, int, int]], *, inputs: bool = False) -> list[Move]:
        """Copies of tokens' keys and values, or activations, as they are stored, to rows of a block ``[n, W]``: by
        `runs` of a sequence's tokens from one on, so many, to a row of the block and those behind it."""
        return (self._inputs if inputs else self._rows).moves(block, runs)

    def in_memory(self, *, inputs: bool = False) -> list[int]:
        """Leading tokens whose keys and values, or activations, lie in host memory, up to those that are resident."""
        return self.residents.before([paged.in_memory() for paged in (self._inputs if inputs else self._rows)])

    def rows_in_memory(self, sequence: int, count: int, first: int = 0) -> Runs:
        """Keys and values of tokens from `first` up to `count` where they lie."""
        return self._rows[sequence].runs_in_memory(count, first)

    def bytes_for(self, tokens: list[int], heads: HeadShares | None = None, prompts: Sequence[int] = ()) -> int:
        """Bytes of the pages of so many tokens of each sequence, in one layer; in one with other `heads` if these are
        given, of sequences that began as so numbered `prompts`.

        With activations, where those of the pass under way are kept: of what follows a gap none are.
        """
        page, width = self.engine.pool.page_bytes, self.input_width
        row_bytes = self.row_bytes if heads is None else heads.alone * self.body_row_bytes
        offered = max((block.shape[1] for block, _ in self._offered.values()), default=0)
        keeps = offered > 0 and self._config.keeps_inputs(offered * self.dtype.itemsize, row_bytes)
        if keeps:
            width = max(width, offered)
        found = sum(page_bytes(count, row_bytes, page) for count in tokens)
        if heads is not None:
            for own in (heads.most_tokens(*each) for each in zip(prompts, tokens, strict=True)):
                found += sum(page_bytes(most, self.body_row_bytes, page) for most in own)
        for sequence, count in enumerate(tokens if width else ()):
            inputs = self._inputs[sequence]
            unbroken = keeps and inputs.length == self.rows(sequence)
            held = count if unbroken else min(count, inputs.length - inputs.gone)
            found += page_bytes(held, width * self.dtype.itemsize, page)
        return found
