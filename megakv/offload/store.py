"""The store of one layer whose rows lie in tiers off the accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megakv.cache.store import KVStore
from megakv.device import upload
from megakv.distributed.sharding import IntArray
from megakv.offload.config import OffloadConfig
from megakv.offload.link import Link, Move, Transfer
from megakv.offload.pages import OutgoingRows, PagedRows, Runs, page_bytes, start_reading
from megakv.offload.pool import Page, PagePool
from megakv.offload.residents import LayerResidents, ResidentBudget, ResidentRows
from megakv.offload.row_format import RowFormat
from megakv.offload.staging import StagedLayer
from megakv.tensor_files import StreamedTensor

if TYPE_CHECKING:
    from megakv.attention.method import AttentionCall
    from megakv.distributed.sharding import TokenBlock
    from megakv.offload.host_rank import HostPart


class StoreEngine(Protocol):
    """What a store asks of the engine that it belongs to, and tells it (see `Offloader`)."""

    config: OffloadConfig
    link: Link
    pool: PagePool
    device: torch.device
    residents: ResidentBudget

    def expect(self, store: TieredStore) -> None: ...
    def at_work(self, store: TieredStore) -> bool: ...
    def staged(self, store: TieredStore) -> StagedLayer | None: ...
    def await_streamed(self, staged: StagedLayer) -> None: ...
    def attend_on_host(
        self, store: TieredStore, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock
    ) -> HostPart | None: ...
    def sent(self, transfer: Transfer) -> None: ...
    def leave(self, store: TieredStore) -> None: ...


class TieredStore(RowFormat, KVStore):
    """Keys, values and activations of one layer on this rank, per sequence, off the accelerator.

    A token's row holds its keys, then its values, all heads: a run of tokens is one block of memory. `version` goes up
    when rows are cut or change places; `keeps_inputs` says whether activations are wanted, as far as is known.
    """

    def __init__(self, layer: int, batch: int, engine: StoreEngine):
        super().__init__(engine.config)
        self.layer, self.version, self.keeps_inputs = layer, 0, True
        self._engine = engine
        self._rows: list[PagedRows | None] = [None] * batch
        self._inputs: list[PagedRows | None] = [None] * batch
        self._outgoing = OutgoingRows()
        self._residents = LayerResidents(engine.residents, layer, [None] * batch)
        # By sequence: activations of the tokens that come next; a prompt's rows while its layer is at work.
        self._offered: dict[int, Tensor] = {}
        self._fresh: dict[int, Tensor] = {}
        # Of the pass under way: rows that no buffer has yet, and tokens that were there when the layer began.
        self._late: dict[int, tuple[int, Tensor]] = {}
        self._began: dict[int, int] = {}

    # As a KVStore

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        self._append([sequence], k_KSD, v_KSD)

    def append_each(self, sequences: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> None:
        self._append(sequences, k_KLD, v_KLD)

    def _append(self, sequences: Sequence[int], k_KLD: Tensor, v_KLD: Tensor) -> None:
        """Rows of one sequence, or one row of each of several."""
        rows, firsts = self.rows_of(k_KLD, v_KLD), [self.rows(sequence) for sequence in sequences]
        stored = rows if self.quantiser is None else self.quantiser.pack(rows)
        pieces = stored.split(1 if len(sequences) > 1 else len(stored))
        offered = self._offered.get(sequences[0])
        if offered is not None:
            # No larger activations can pay, on any machine.
            self.keeps_inputs = self._config.keeps_inputs(offered.nbytes, pieces[0].nbytes)
        self._engine.expect(self)
        if offered is not None:
            # What is smaller is the better use of memory. Activations of all sequences are there already.
            smaller = offered.nbytes < pieces[0].nbytes
            self._keep_inputs({each: self.rows(each) for each in self._offered if smaller})
        for sequence, piece in zip(sequences, pieces, strict=True):
            self._write(self._rows, sequence, piece)
        self._keep_inputs({each: first for each, first in zip(sequences, firsts, strict=True) if each in self._offered})
        for sequence, first, own in zip(sequences, firsts, rows.split(len(rows) // len(sequences)), strict=True):
            self._residents.append(sequence, first, own)
        self._pass_on(sequences, firsts, rows)

    def _keep_inputs(self, firsts: dict[int, int]) -> None:
        for sequence, first in firsts.items():
            offered, inputs = self._offered.pop(sequence), self._inputs[sequence]
            # Only an unbroken run from the first token on can be recomputed.
            if self.keeps_inputs and (inputs.length if inputs else 0) == first:
                self._write(self._inputs, sequence, offered)

    def _write(self, column: list[PagedRows | None], sequence: int, rows: Tensor) -> None:
        paged = column[sequence]
        if paged is None:
            paged = column[sequence] = PagedRows(self._engine.pool, rows.shape[1], rows.dtype, layer=self.layer)
        self._outgoing.add(paged, rows)

    def _pass_on(self, sequences: Sequence[int], firsts: Sequence[int], rows: Tensor) -> None:
        """New rows ``[n, W]`` to where attention reads them in the pass under way."""
        at_work, staged = self._engine.at_work(self), self._engine.staged(self)
        if at_work:
            for sequence, first in zip(sequences, firsts, strict=True):
                self._began.setdefault(sequence, first)
        if staged is not None and len(sequences) > 1 and all(each in staged.group for each in sequences):
            staged.put_each(sequences, firsts, rows)
            return
        for sequence, first, own in zip(sequences, firsts, rows.split(len(rows) // len(sequences)), strict=True):
            if staged is not None and sequence in staged.group:
                staged.put(sequence, first, own)
                continue
            if at_work:
                self._late[sequence] = first, own
            self._fresh.pop(sequence, None)
            if first == 0:
                self._fresh[sequence] = own

    def part(self, sequence: int) -> tuple[Tensor, Tensor]:
        self.flush()
        paged = self._rows[sequence]
        assert paged is not None
        staged = self._engine.staged(self)
        if staged is not None:
            self._engine.await_streamed(staged)
            at = staged.starts[sequence]
            return self.heads_of(staged.rows[at : staged.row(sequence, paged.length)])
        fresh = self._fresh.get(sequence)
        if fresh is not None and len(fresh) == paged.length:
            return self.heads_of(fresh)
        device = torch.empty((paged.length, paged.width), dtype=self.stored_dtype, device=self._engine.device)
        start_reading(self._engine.link, *paged.moves(0, device)).wait()
        return self.heads_of(self.unpacked(device))

    def packed(self) -> tuple[Tensor, Tensor, list[int], list[int]] | None:
        staged = self._engine.staged(self)
        if staged is None:
            return None
        self.flush()
        self._engine.await_streamed(staged)
        counts = [
            length - away if sequence in staged.group else 0
            for sequence, (length, away) in enumerate(zip(self.lengths(), staged.away, strict=True))
        ]
        return *self.heads_of(staged.rows), staged.starts, counts

    def save(self, sequence: int, slots: IntArray) -> dict[str, StreamedTensor]:
        """From where the rows lie, without the accelerator."""
        self.flush()
        rows = self._rows[sequence]
        if rows is None or not rows.length:
            return {}
        shape = self.head_shape

        def heads(kind: int) -> Iterator[Tensor]:
            runs = [self.heads_of(self.unpacked(run))[kind] for _, run in rows.runs_in_memory(rows.length)]
            for head in range(shape.heads):
                yield from (run[head] for run in runs)

        return {
            name: StreamedTensor((shape.heads, rows.length, dim), self.dtype, partial(heads, kind))
            for kind, (name, dim) in enumerate((("k", shape.key_dim), ("v", shape.value_dim)))
        }

    def rows(self, sequence: int) -> int:
        paged = self._rows[sequence]
        return 0 if paged is None else paged.length

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> HostPart | None:
        return self._engine.attend_on_host(self, call, q_HLD, tokens)

    def crop(self, sequence: int, length: int) -> None:
        self.flush()
        if length < self.rows(sequence):
            self.version += 1
        for paged in (self._rows[sequence], self._inputs[sequence]):
            if paged is not None:
                paged.truncate(length)
        self._residents.crop(sequence, length)
        for under_way in (self._fresh, self._late, self._began, self._offered):
            under_way.pop(sequence, None)

    def reorder(self, index: list[int]) -> None:
        if index == list(range(len(self._rows))):
            return
        self.flush()
        self.version += 1
        self._fresh.clear()
        self._residents.reorder(index)
        for rows in (self._rows, self._inputs):
            present = list(rows)
            rows[:] = [None if (row := present[source]) is None else row.fork() for source in index]

    def fork(self) -> TieredStore:
        self.flush()
        twin = TieredStore(self.layer, len(self._rows), self._engine)
        twin.take_format(self)
        twin._residents = self._residents.fork()
        twin._rows, twin._inputs = ([row and row.fork() for row in column] for column in (self._rows, self._inputs))
        return twin

    def finish(self) -> None:
        self.flush()
        for rows in (self._fresh, self._late, self._began):
            rows.clear()
        self._engine.leave(self)

    def nbytes(self) -> int:
        return sum(row.nbytes for row in (*self._rows, *self._inputs) if row is not None)

    # For the engine

    def offer(self, stored: TokenBlock, hidden_LE: Tensor, kept: IntArray | None) -> None:
        """Take the activations ``[L, h]`` of the tokens that are appended next: those at `kept`, or all."""
        # A copy: the model may go on to work on its own tensor in place.
        hidden_LE = hidden_LE.clone() if kept is None else hidden_LE[upload(kept, hidden_LE.device)]
        for sequence in range(stored.batch):
            run = stored.run(sequence)
            if run.stop > run.start:
                self._offered[sequence] = hidden_LE[run]

    def flush(self) -> None:
        """Send what was appended to its tier: new tokens only."""
        transfer = self._outgoing.send(self._engine.link)
        if transfer is not None:
            self._engine.sent(transfer)

    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        return [self.rows(sequence) for sequence in range(len(self._rows))]

    def cached_before_step(self) -> list[int]:
        """Tokens of every sequence, without those of the pass under way while its layer is at work."""
        return [self._began.get(sequence, count) for sequence, count in enumerate(self.lengths())]

    def put_late(self, group: range, staged: StagedLayer | None) -> None:
        """Write rows of the pass under way into a group's buffer, if it has one."""
        for sequence in group:
            late = self._late.pop(sequence, None)
            if late is not None and staged is not None:
                staged.put(sequence, *late)

    def move_residents(self, staged: StagedLayer) -> None:
        """Move the resident rows of sequences that have grown: all behind those that stay away are in the buffer."""
        for sequence in self._residents.take_grown(staged.group):
            if staged.streamed is not None:
                self._engine.await_streamed(staged)
            first = staged.away[sequence]
            rows = staged.rows[staged.row(sequence, first) : staged.row(sequence, self.rows(sequence))]
            self._residents.move(sequence, first, rows)

    def with_inputs(self) -> list[int]:
        """Leading tokens of every sequence whose activations are kept, up to those that are resident."""
        return self._before_residents([0 if row is None else row.length for row in self._inputs])

    def resident(self, sequence: int) -> ResidentRows | None:
        """Rows of a sequence that stay on the accelerator."""
        return self._residents.rows[sequence]

    def residents(self) -> list[int]:
        """Tokens of every sequence that stay on the accelerator."""
        return [0 if rows is None else len(rows.rows) for rows in self._residents.rows]

    def _before_residents(self, counts: list[int]) -> list[int]:
        return [
            min(count, rows.first) if rows else count for count, rows in zip(counts, self._residents.rows, strict=True)
        ]

    @property
    def input_width(self) -> int:
        """Elements of a token's activations; 0 where none are kept."""
        return max((row.width for row in self._inputs if row is not None), default=0)

    @property
    def input_bytes(self) -> int:
        """Bytes of a token's activations; 0 where none are kept."""
        width = self.input_width
        return width * self.dtype.itemsize if width else 0

    def row_moves(self, sequence: int, first: int, device: Tensor) -> tuple[list[Move], list[Page]]:
        """Copies of keys and values of tokens from `first` on to device memory ``[n, stored_width]``."""
        paged = self._rows[sequence]
        return ([], []) if paged is None else paged.moves(first, device)

    def input_moves(self, sequence: int, first: int, device: Tensor) -> tuple[list[Move], list[Page]]:
        """Copies of activations of tokens from `first` on to device memory ``[n, h]``."""
        paged = self._inputs[sequence]
        return ([], []) if paged is None else paged.moves(first, device)

    def in_memory(self, *, inputs: bool = False) -> list[int]:
        """Leading tokens whose keys and values, or activations, lie in host memory, up to those that are resident."""
        column = self._inputs if inputs else self._rows
        return self._before_residents([row.in_memory() if row else 0 for row in column])

    def rows_in_memory(self, sequence: int, count: int, first: int = 0) -> Runs:
        """Keys and values of tokens from `first` up to `count` where they lie."""
        paged = self._rows[sequence]
        return [] if paged is None else paged.runs_in_memory(count, first)

    def bytes_for(self, tokens: list[int]) -> int:
        """Bytes of the pages of so many tokens per sequence, in one layer.

        With activations, where those of the pass under way are kept: of what follows a gap none are.
        """
        page, width = self._engine.pool.page_bytes, self.input_width
        keeps = self.keeps_inputs and len(self._offered) > 0
        if keeps:
            width = max(width, *(offered.shape[1] for offered in self._offered.values()))
        found = sum(page_bytes(count, self.row_bytes, page) for count in tokens)
        for sequence, count in enumerate(tokens if width else ()):
            inputs = self._inputs[sequence]
            held = inputs.length if inputs else 0
            unbroken = keeps and held == self.rows(sequence)
            found += page_bytes(count if unbroken else min(count, held), width * self.dtype.itemsize, page)
        return found
