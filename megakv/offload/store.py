"""The store of one layer whose rows lie in tiers off the accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megakv.offload.heads import HeadShape
from megakv.offload.link import Move
from megakv.offload.pages import PagedRows, mark_written, page_bytes, unwritten
from megakv.offload.pool import Page
from megakv.offload.quantization import GroupQuantiser, group_size
from megakv.offload.residents import ResidentRows
from megakv.stores import UniformStore

if TYPE_CHECKING:
    from megakv.attention.method import AttentionCall
    from megakv.offload.host_rank import HostPart
    from megakv.offload.runtime import Offloader
    from megakv.offload.staging import StagedLayer
    from megakv.sharding import TokenBlock


class TieredStore(UniformStore):
    """Keys, values and activations of one layer on this rank, per sequence, off the accelerator.

    A token's row holds its keys, then its values, all heads: a run of tokens is one block of memory.

    Parameters
    ----------
    layer : int
    batch : int
    offloader : Offloader
        Whose link, pages and staged layers it uses.

    Attributes
    ----------
    version : int
        Goes up when rows are cut or change places.
    keeps_inputs : bool
        Whether activations are wanted, as far as is known.
    """

    def __init__(self, layer: int, batch: int, offloader: Offloader):
        self.layer, self.version, self.keeps_inputs = layer, 0, True
        self._offloader = offloader
        self._shape: HeadShape | None = None
        self._dtype: torch.dtype | None = None
        self._quantiser: GroupQuantiser | None = None
        self._rows: list[PagedRows | None] = [None] * batch
        self._inputs: list[PagedRows | None] = [None] * batch
        self._offered: dict[int, Tensor] = {}
        self._fresh: dict[int, Tensor] = {}
        self._resident: list[ResidentRows | None] = [None] * batch
        self._late: dict[int, tuple[int, Tensor]] = {}
        self._began: dict[int, int] = {}
        self._moves: list[Move] = []
        self._pages: list[Page] = []

    # As a KVStore

    def append(self, sequence: int, k_KSD: Tensor, v_KSD: Tensor) -> None:
        self._shape, self._dtype = HeadShape.of(k_KSD, v_KSD), k_KSD.dtype
        rows = HeadShape.joined(k_KSD, v_KSD)
        stored = rows if self.quantiser is None else self.quantiser.pack(rows)
        offered, first = self._offered.get(sequence), self.rows(sequence)
        if offered is not None:
            self.keeps_inputs = self._offloader.worth_keeping(offered, stored)
            # What is smaller is the better use of memory. Activations of all sequences are there already.
            smaller = offered.nbytes < stored.nbytes
            self._keep_inputs({each: self.rows(each) for each in self._offered if smaller})
        self._write(self._rows, sequence, stored)
        self._keep_inputs({sequence: first} if sequence in self._offered else {})
        if first == 0:
            budget, batch = self._offloader.residents, len(self._rows)
            self._resident[sequence] = ResidentRows.of_prompt(budget, self.layer, rows, batch)
        if at_work := self._offloader.at_work(self):
            self._began.setdefault(sequence, first)
        staged = self._offloader.staged(self)
        if staged is not None and sequence in staged.group:
            staged.put(sequence, first, rows)
            return
        if at_work:
            self._late[sequence] = first, rows
        self._fresh.pop(sequence, None)
        if first == 0:
            self._fresh[sequence] = rows

    def part(self, sequence: int) -> tuple[Tensor, Tensor]:
        self.flush()
        paged = self._rows[sequence]
        assert paged is not None
        staged = self._offloader.staged(self)
        if staged is not None:
            self._offloader.await_streamed(staged)
            at = staged.starts[sequence]
            return self.heads_of(staged.rows[at : staged.row(sequence, paged.length)])
        fresh = self._fresh.get(sequence)
        if fresh is not None and len(fresh) == paged.length:
            return self.heads_of(fresh)
        device = torch.empty((paged.length, paged.width), dtype=self.stored_dtype, device=self._offloader.device)
        moves, pages = paged.moves(0, device)
        self._offloader.link.start("in", moves, after=unwritten(pages)).wait()
        if self.quantiser is None:
            return self.heads_of(device)
        rows = torch.empty((paged.length, self.row_width), dtype=self.dtype, device=device.device)
        self.quantiser.unpack(device, rows)
        return self.heads_of(rows)

    def rows(self, sequence: int) -> int:
        paged = self._rows[sequence]
        return 0 if paged is None else paged.length

    def attend_elsewhere(self, call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock) -> HostPart | None:
        return self._offloader.attend_on_host(self, call, q_HLD, tokens)

    def crop(self, lengths: list[int]) -> None:
        self.flush()
        for paged, length in zip(self._rows, lengths, strict=True):
            if paged is not None and length < paged.length:
                paged.truncate(length)
                self.version += 1
        self._resident = [rows and rows.cut(length) for rows, length in zip(self._resident, lengths, strict=True)]
        for inputs, length in zip(self._inputs, lengths, strict=True):
            if inputs is not None:
                inputs.truncate(length)
        for rows in (self._fresh, self._late, self._began, self._offered):
            rows.clear()

    def reorder(self, index: list[int]) -> None:
        if index == list(range(len(self._rows))):
            return
        self.flush()
        self.version += 1
        self._fresh.clear()
        self._resident = [self._resident[source] for source in index]
        for rows in (self._rows, self._inputs):
            present = list(rows)
            rows[:] = [None if (row := present[source]) is None else row.fork() for source in index]

    def fork(self) -> TieredStore:
        self.flush()
        twin = TieredStore(self.layer, len(self._rows), self._offloader)
        twin._shape, twin._dtype = self._shape, self._dtype
        twin._resident = list(self._resident)
        twin._rows, twin._inputs = ([row and row.fork() for row in column] for column in (self._rows, self._inputs))
        return twin

    def release(self) -> None:
        before = self.settled()
        for rows in (self._fresh, self._late, self._began):
            rows.clear()
        self._offloader.leave(self, before)

    def nbytes(self) -> int:
        return sum(row.nbytes for row in (*self._rows, *self._inputs) if row is not None)

    # For the runtime

    def offer(self, sequence: int, x_LE: Tensor) -> None:
        """The activations ``[n, h]`` of the tokens that are appended to a sequence next."""
        self._offered[sequence] = x_LE

    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        return [self.rows(sequence) for sequence in range(len(self._rows))]

    def settled(self) -> list[int]:
        """Tokens of every sequence, without those of the pass under way while its layer is at work."""
        return [self._began.get(sequence, count) for sequence, count in enumerate(self.lengths())]

    def put_late(self, group: range, staged: StagedLayer | None) -> None:
        """Write rows of the pass under way into a group's buffer, if it has one."""
        for sequence in group:
            late = self._late.pop(sequence, None)
            if late is not None and staged is not None:
                staged.put(sequence, *late)

    def with_inputs(self) -> list[int]:
        """Leading tokens of every sequence whose activations are kept, up to those that are resident."""
        return self._before_residents([0 if row is None else row.length for row in self._inputs])

    def resident(self, sequence: int) -> ResidentRows | None:
        """Rows of a sequence that stay on the accelerator."""
        return self._resident[sequence]

    def residents(self) -> list[int]:
        """Tokens of every sequence that stay on the accelerator."""
        return [0 if rows is None else len(rows.rows) for rows in self._resident]

    def _before_residents(self, counts: list[int]) -> list[int]:
        return [min(count, rows.first) if rows else count for count, rows in zip(counts, self._resident, strict=True)]

    @property
    def row_width(self) -> int:
        """Elements of a token's keys and values."""
        return self.head_shape.width

    @property
    def input_width(self) -> int:
        """Elements of a token's activations; 0 where none are kept."""
        return max((row.width for row in self._inputs if row is not None), default=0)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's keys and values off the accelerator."""
        return self.stored_width * self.stored_dtype.itemsize

    @property
    def quantiser(self) -> GroupQuantiser | None:
        """What rows are packed with off the accelerator; None where they keep their type."""
        asked = self._offloader.config
        if asked.kv_bits is None:
            return None
        if self._quantiser is None:
            group = group_size(self.head_shape.key_dim, self.head_shape.value_dim, asked.kv_group)
            self._quantiser = GroupQuantiser(self.row_width, group, self.dtype)
        return self._quantiser

    @property
    def stored_width(self) -> int:
        """Elements of a token's row off the accelerator."""
        return self.row_width if self.quantiser is None else self.quantiser.nbytes

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the rows off the accelerator."""
        return self.dtype if self.quantiser is None else torch.uint8

    @property
    def input_bytes(self) -> int:
        """Bytes of a token's activations; 0 where none are kept."""
        return self.input_width * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows."""
        assert self._dtype is not None
        return self._dtype

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

    def rows_in_memory(self, sequence: int, count: int) -> list[tuple[int, Tensor]]:
        """The first tokens' keys and values where they lie: runs of rows ``[n, W]``, each with its first token."""
        paged = self._rows[sequence]
        return [] if paged is None else paged.runs_in_memory(count)

    def bytes_for(self, tokens: list[int]) -> int:
        """Bytes of the pages of so many tokens per sequence, in one layer."""
        page = self._offloader.pool.page_bytes
        widths = [width for width in (self.row_bytes, self.input_bytes) if width]
        return sum(page_bytes(count, width, page) for count in tokens for width in widths)

    @property
    def head_shape(self) -> HeadShape:
        """What a row is made of."""
        assert self._shape is not None
        return self._shape

    def heads_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, W]`` rows as keys ``[K, n, D]`` and values ``[K, n, Dv]``: views."""
        return self.head_shape.split(rows)

    def flush(self) -> None:
        """Send what was appended to its tier: new tokens only."""
        if self._moves:
            ticket = self._offloader.link.start("out", self._moves)
            mark_written(self._pages, ticket)
            self._offloader.sent(ticket)
            self._moves, self._pages = [], []

    def _keep_inputs(self, firsts: dict[int, int]) -> None:
        for sequence, first in firsts.items():
            offered, inputs = self._offered.pop(sequence), self._inputs[sequence]
            # Only an unbroken run from the first token on can be recomputed.
            if self.keeps_inputs and (inputs.length if inputs else 0) == first:
                self._write(self._inputs, sequence, offered)

    def _write(self, column: list[PagedRows | None], sequence: int, rows: Tensor) -> None:
        paged = column[sequence]
        if paged is None:
            paged = column[sequence] = PagedRows(self._offloader.pool, rows.shape[1], rows.dtype, layer=self.layer)
        moves, pages = paged.moves(paged.extend(len(rows)), rows.contiguous())
        self._moves += moves
        self._pages += pages
