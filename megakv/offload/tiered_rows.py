"""Rows of one layer in tiers off the accelerator: where they lie, what leaves for there, and what comes from there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from megakv.attention.method import AttentionCall, PartElsewhere
from megakv.base.device import upload
from megakv.cache.shares import HeadShares
from megakv.costmodel.stored_rows import page_bytes
from megakv.distributed.sharding import IntArray, TokenBlock
from megakv.offload.config import OffloadConfig
from megakv.offload.layer_rows import LayerRows
from megakv.offload.link import Link, Move
from megakv.offload.paged_rows import PagedRows, Runs
from megakv.offload.pages import PagePool
from megakv.offload.residents import LayerResidents, ResidentBudget
from megakv.offload.row_format import RowFormat


class StoreEngine(Protocol):
    """Offload engine, as far as stores ask it and tell it (see `Offloader`)."""

    config: OffloadConfig
    link: Link
    pool: PagePool
    device: torch.device
    residents: ResidentBudget

    def expect(self, store: Any) -> None: ...
    def attend_on_host(
        self, strips: Sequence[Any], call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock
    ) -> PartElsewhere | None: ...
    def leave(self, store: Any) -> None: ...


class TieredRows(RowFormat):
    """Keys, values and activations of one layer on this rank, per sequence, in the pages of a pool.

    A token's row holds its keys, then its values, all heads: a run of tokens is one block of memory. `version` goes up
    when rows are cut or change places; `keeps_inputs` says whether activations are wanted, as far as is known. Of what
    stays on the accelerator of a layer its rows are a `part`.
    """

    def __init__(self, layer: int, batch: int, engine: StoreEngine, part: float = 1.0):
        super().__init__(engine.config)
        self.layer, self.version, self.keeps_inputs, self.engine = layer, 0, True, engine
        self.residents = LayerResidents(engine.residents, layer, [None] * batch, part)
        self._rows, self._inputs = (
            LayerRows(PagedRows(engine.pool, layer=layer) for _ in range(batch)) for _ in range(2)
        )
        self._outgoing: list[Move] = []
        # By sequence, activations of the tokens that come next: which of a pass's or a group's ``[L, h]``.
        self._offered: dict[int, tuple[Tensor, slice]] = {}

    # What leaves

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

    def _extend(self, sequences: Sequence[int], rows: Tensor) -> list[int]:
        """Add equal numbers of rows ``[n, W]`` behind those of some sequences; returns the index of each one's first.

        With them go activations that were offered.
        """
        lengths, each = self.lengths(), rows.shape[0] // len(sequences)
        firsts = [lengths[sequence] for sequence in sequences]
        stored = rows if self.quantiser is None else self.quantiser.pack(rows)
        if sequences[0] in self._offered:
            block, span = self._offered[sequences[0]]
            if span.stop - span.start != each:
                # They did not come in one piece.
                del self._offered[sequences[0]]
            else:
                # No larger activations can pay, on any machine.
                self.keeps_inputs = self._config.keeps_inputs(*(part[:each].nbytes for part in (block, stored)))
        self.engine.expect(self)
        if sequences[0] in self._offered:
            # They have memory first, as they take less. Those of all sequences are there already.
            self._keep_inputs(lengths)
        spans = [slice(each * index, each * (index + 1)) for index in range(len(sequences))]
        self._outgoing += self._rows.extend_each(sequences, stored.contiguous(), spans)
        self.residents.append_each(sequences, firsts, rows)
        return firsts

    def _keep_inputs(self, lengths: Sequence[int]) -> None:
        """Send activations that were offered of the tokens behind so many of each sequence."""
        offered, self._offered = self._offered, {}
        # Only an unbroken run from the first token on can be recomputed. Autocast may give a pass another type.
        unbroken = [
            sequence
            for sequence, (block, _) in offered.items()
            if self.keeps_inputs and block.dtype == self.dtype and self._inputs[sequence].length == lengths[sequence]
        ]
        for _, same in groupby(unbroken, lambda sequence: id(offered[sequence][0])):
            own = list(same)
            spans = [offered[sequence][1] for sequence in own]
            self._outgoing += self._inputs.extend_each(own, offered[own[0]][0], spans)

    def flush(self) -> None:
        """Send what was appended to its tier: new tokens only."""
        if self._outgoing:
            self.engine.link.start("out", self._outgoing)
            self._outgoing = []

    # What is there

    @property
    def sequences(self) -> range:
        """Numbers of the batch's sequences."""
        return range(len(self._rows))

    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        # Every layer of every step asks for them several times.
        return [paged.length for paged in self._rows]

    def gone(self, sequence: int) -> int:
        """Rows that are not held any more."""
        return self._rows[sequence].gone

    def with_inputs(self) -> list[int]:
        """Leading tokens of every sequence whose activations are kept, up to those that are resident."""
        return self.residents.before([paged.length for paged in self._inputs])

    def in_memory(self, *, inputs: bool = False) -> list[int]:
        """Leading tokens whose keys and values, or activations, lie in host memory, up to those that are resident."""
        return self.residents.before([paged.in_memory() for paged in (self._inputs if inputs else self._rows)])

    @property
    def input_width(self) -> int:
        """Elements of a token's activations; 0 where none are kept."""
        return max((paged.width for paged in self._inputs), default=0)

    @property
    def input_bytes(self) -> int:
        """Bytes of a token's activations; 0 where none are kept."""
        return self.input_width and self.input_width * self.dtype.itemsize

    @property
    def rows_per_page(self) -> list[int]:
        """Rows in a page of keys and values, and of activations, of each sequence that has some."""
        return [paged.per_page for paged in (*self._rows, *self._inputs) if paged.width]

    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(paged.nbytes for paged in (*self._rows, *self._inputs))

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
        lengths = self.lengths()
        for sequence, count in enumerate(tokens if width else ()):
            inputs = self._inputs[sequence]
            unbroken = keeps and inputs.length == lengths[sequence]
            held = count if unbroken else min(count, inputs.length - inputs.gone)
            found += page_bytes(held, width * self.dtype.itemsize, page)
        return found

    # What comes

    def moves(self, block: Tensor, runs: Sequence[tuple[int, int, int, int]], *, inputs: bool = False) -> list[Move]:
        """Copies of tokens' keys and values, or activations, as they are stored, to rows of a block ``[n, W]``: by
        `runs` of a sequence's tokens from one on, so many, to a row of the block and those behind it."""
        return (self._inputs if inputs else self._rows).moves(block, runs)

    def brought_now(self, sequence: int) -> Tensor:
        """All rows of a sequence ``[n, W]`` on the accelerator."""
        paged, device = self._rows[sequence], self.engine.device
        block = torch.empty((paged.length - paged.gone, paged.width), dtype=self.stored_dtype, device=device)
        self.engine.link.start("in", paged.moves(paged.gone, block)).wait()
        return self.unpacked(block)

    def rows_in_memory(self, sequence: int, count: int, first: int = 0) -> Runs:
        """Keys and values of tokens from `first` up to `count`, as they are stored, where they lie."""
        return self._rows[sequence].runs_in_memory(count, first)

    # What goes

    def forget(self, sequence: int, rows: int) -> None:
        """What is on the way from pages, or into them, goes on: who takes them next waits for it."""
        self._rows[sequence].forget(rows)
        # Those of rows that never came are nobody's.
        if self._inputs[sequence].known:
            self._inputs[sequence].forget(rows)
        self.residents.forget(sequence, rows)

    def _truncate(self, sequence: int, length: int) -> None:
        for paged in (self._rows[sequence], self._inputs[sequence]):
            paged.truncate(length)
        self.residents.crop(sequence, length)
        self._offered.pop(sequence, None)

    def _reorder(self, index: list[int]) -> None:
        self.version += 1
        self.residents.reorder(index)
        self._rows, self._inputs = self._rows.fork(index), self._inputs.fork(index)

    def _share_rows_of(self, other: TieredRows) -> None:
        """Hold the same rows; what is appended to one is not seen by the other."""
        self.take_format_of(other)
        self.residents = other.residents.fork()
        self._rows, self._inputs = other._rows.fork(other.sequences), other._inputs.fork(other.sequences)
