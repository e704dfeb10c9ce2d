"""Rows of one sequence and layer, spread over pages of the tiers, and new rows on their way there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megakv.errors import MegaKVError
from megakv.offload.host_memory import HostTier, in_units
from megakv.offload.link import Link, Move, StoredRows, Transfer
from megakv.offload.pool import Page, PagePool

Runs = list[tuple[int, Tensor]]
"""Rows where they lie on the host: runs ``[n, W]`` in ascending order, each with the index of its first row."""


def page_bytes(count: int, row_bytes: int, size: int) -> int:
    """Bytes of the pages of a size that so many rows take; a MegaKVError if a row does not fit a page."""
    if row_bytes > size:
        raise MegaKVError(
            f"megakv.offload.page_kib = {size >> 10} is too small: a token's row in one layer has {in_units(row_bytes)}"
        )
    return size * -(-count // (size // row_bytes))


class PagedRows:
    """A growing number of rows of one width, of a layer; forks share pages until either grows."""

    def __init__(self, pool: PagePool, width: int, dtype: torch.dtype, *, layer: int = 0):
        self.width = width
        self.length = 0
        self._layer, self._pool = layer, pool
        self._dtype = dtype
        self._row_bytes = width * dtype.itemsize
        self._per_page = pool.page_bytes // self._row_bytes
        self._pages: list[Page] = []
        # Leading pages that are known to lie in memory.
        self._leading = 0
        page_bytes(0, self._row_bytes, pool.page_bytes)

    def __del__(self) -> None:
        for page in getattr(self, "_pages", ()):
            self._pool.give(page)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, room in the last one included."""
        return len(self._pages) * self._pool.page_bytes

    def _rows(self, page: Page, offset: int, count: int) -> Tensor | StoredRows:
        return page.tier.rows(offset, count, self.width, self._dtype)

    def _pages_of(self, first: int, count: int) -> list[Page]:
        return self._pages[first // self._per_page : -(-(first + count) // self._per_page)]

    def extend(self, count: int) -> int:
        """Make room for rows behind the present ones, which stay as they were where the budgets are used up.

        Returns the first one's index.
        """
        first, needed = self.length, -(-(self.length + count) // self._per_page)
        taken: list[Page] = []
        try:
            inner = first % self._per_page
            if count and inner and self._pages[first // self._per_page].users > 1:
                self._replace_last(inner)
            while len(self._pages) + len(taken) < needed:
                taken.append(self._pool.take(self._layer))
        except MegaKVError:
            for page in taken:
                self._pool.give(page)
            raise
        self._pages += taken
        self.length += count
        return first

    def _replace_last(self, rows: int) -> None:
        """A page of one's own in the place of a shared last page that is partly filled."""
        index = self.length // self._per_page
        shared, own = self._pages[index], self._pool.take(self._layer)
        # The host itself writes at once, whatever the link has queued.
        for transfer in (*shared.busy, *own.busy):
            transfer.settle()
        buffer = torch.empty(rows, self.width, dtype=self._dtype)
        Move(self._rows(shared, shared.offset, rows), buffer).run("in")
        Move(self._rows(own, own.offset, rows), buffer).run("out")
        self._pages[index] = own
        self._leading = min(self._leading, index)
        self._pool.give(shared)

    def moves(self, first: int, device: Tensor) -> tuple[list[Move], list[Page]]:
        """Copies between rows from `first` on and device memory ``[n, W]``, as few as pages allow; and the pages."""
        count = device.shape[0]
        if count == 1:
            # Each step of decoding writes single rows: in little time.
            index, inner = divmod(first, self._per_page)
            page = self._pages[index]
            return [Move(self._rows(page, page.offset + inner * self._row_bytes, 1), device)], [page]
        found = [
            Move(self._rows(page, offset, size), device[start : start + size] if size < count else device)
            for page, offset, start, size in self._spans(first, count)
        ]
        return found, self._pages_of(first, count)

    def _spans(self, first: int, count: int) -> Iterator[tuple[Page, int, int, int]]:
        """Runs of rows that lie one behind the other: page, byte offset, row of the request, number of rows."""
        held: tuple[Page, int, int, int] | None = None
        done = 0
        while done < count:
            index, inner = divmod(first + done, self._per_page)
            page = self._pages[index]
            size = min(self._per_page - inner, count - done)
            offset = page.offset + inner * self._row_bytes
            if held is not None and held[0].tier is page.tier and held[1] + held[3] * self._row_bytes == offset:
                held = (held[0], held[1], held[2], held[3] + size)
            else:
                if held is not None:
                    yield held
                held = (page, offset, done, size)
            done += size
        if held is not None:
            yield held

    def in_memory(self) -> int:
        """Leading rows that lie in memory, or are on the way there."""
        pages = self._pages
        while self._leading < len(pages) and isinstance(pages[self._leading].tier, HostTier):
            self._leading += 1
        return self.length if self._leading == len(pages) else self._leading * self._per_page

    def runs_in_memory(self, count: int, first: int = 0) -> Runs:
        """Rows from `first` up to `count`; waits for those that are on the way there."""
        for page in self._pages_of(first, count - first):
            if page.written is not None:
                page.written.settle()
        found = []
        for page, offset, start, size in self._spans(first, count - first):
            rows = self._rows(page, offset, size)
            if not isinstance(rows, Tensor):
                # A shared page that was in memory may have been copied to disk since these rows were counted.
                copied = torch.empty(size, self.width, dtype=self._dtype)
                rows.read_into(copied)
                rows = copied
            found.append((first + start, rows))
        return found

    def truncate(self, length: int) -> None:
        """Keep the first rows only."""
        self.length = min(self.length, length)
        kept = -(-self.length // self._per_page)
        for page in self._pages[kept:]:
            self._pool.give(page)
        del self._pages[kept:]
        self._leading = min(self._leading, kept)

    def fork(self) -> PagedRows:
        """The same rows; what is appended to one is not seen by the other."""
        twin = PagedRows(self._pool, self.width, self._dtype, layer=self._layer)
        twin.length = self.length
        twin._pages, twin._leading = list(self._pages), self._leading
        for page in twin._pages:
            page.users += 1
        return twin


def mark_written(pages: Sequence[Page], transfer: Transfer) -> None:
    """Note the transfer that writes to pages, so that whoever reads them waits for it."""
    for page in pages:
        page.written = transfer


def start_reading(link: Link, moves: Sequence[Move], pages: Sequence[Page]) -> Transfer:
    """Begin to bring rows of pages, behind what is on its way there; whoever writes to them next waits for it."""
    transfer = link.start("in", moves, after=unwritten(pages))
    for page in pages:
        page.read = transfer
    return transfer


def unwritten(pages: Sequence[Page]) -> list[Transfer]:
    """Transfers into pages that have not ended yet."""
    transfers: dict[int, Transfer] = {}
    for page in pages:
        if page.written is not None and not page.written.done:
            transfers[id(page.written)] = page.written
    return list(transfers.values())


class OutgoingRows:
    """Rows that have their place in a tier and are sent there together."""

    def __init__(self) -> None:
        self._moves: list[Move] = []
        self._pages: list[Page] = []

    def add(self, paged: PagedRows, rows: Tensor) -> None:
        """Give rows ``[n, W]`` their place behind the present ones."""
        moves, pages = paged.moves(paged.extend(len(rows)), rows.contiguous())
        self._moves += moves
        self._pages += pages

    def send(self, link: Link) -> Transfer | None:
        """Begin to send what was added, once nobody reads their pages any more; None where nothing was."""
        if not self._moves:
            return None
        reads = {id(page.read): page.read for page in self._pages if page.read is not None and not page.read.done}
        transfer = link.start("out", self._moves, after=list(reads.values()))
        mark_written(self._pages, transfer)
        self._moves, self._pages = [], []
        return transfer
