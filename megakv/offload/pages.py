"""Rows of one sequence and layer, spread over pages of the tiers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megakv.errors import MegaKVError
from megakv.offload.link import MemoryRows, Move, Ticket
from megakv.offload.pool import Page, PagePool
from megakv.offload.tiers import HostTier, Tier, in_units


def page_bytes(count: int, row_bytes: int, size: int) -> int:
    """Bytes of the pages of a size that so many rows take.

    Raises
    ------
    MegaKVError
        If a row does not fit a page.
    """
    if row_bytes > size:
        raise MegaKVError(
            f"megakv.offload.page_kib = {size >> 10} is too small: a token's row in one layer has {in_units(row_bytes)}"
        )
    return size * -(-count // (size // row_bytes))


class PagedRows:
    """A growing number of rows of one width. Forks share pages until either grows.

    Parameters
    ----------
    pool : PagePool
    width : int
        Elements of a row.
    dtype : torch.dtype
    layer : int
        Whose rows they are.
    only : Tier, optional
        Where they must lie.

    Raises
    ------
    MegaKVError
        If a row does not fit a page.
    """

    def __init__(self, pool: PagePool, width: int, dtype: torch.dtype, *, layer: int = 0, only: Tier | None = None):
        self.width = width
        self.length = 0
        self._layer, self._only = layer, only
        self._pool = pool
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

    def bytes_for(self, count: int) -> int:
        """Bytes of the pages of so many rows."""
        return page_bytes(count, self._row_bytes, self._pool.page_bytes)

    def extend(self, count: int) -> int:
        """Make room for rows behind the present ones; returns the first one's index.

        Raises
        ------
        MegaKVError
            If the budgets are used up. The rows stay as they were.
        """
        first, needed = self.length, -(-(self.length + count) // self._per_page)
        taken: list[Page] = []
        try:
            inner = first % self._per_page
            if count and inner and self._pages[first // self._per_page].users > 1:
                self._replace_last(inner)
            while len(self._pages) + len(taken) < needed:
                taken.append(self._pool.take(self._layer, self._only))
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
        shared, own = self._pages[index], self._pool.take(self._layer, self._only)
        # The host itself writes at once, whatever the link has queued.
        for ticket in (*shared.busy, *own.busy):
            ticket.settle()
        buffer = torch.empty(rows, self.width, dtype=self._dtype)
        shared.tier.rows(shared.offset, rows, self.width, self._dtype).read_into(buffer)
        own.tier.rows(own.offset, rows, self.width, self._dtype).write_from(buffer)
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
            row = page.tier.rows(page.offset + inner * self._row_bytes, 1, self.width, self._dtype)
            return [Move(row, device)], [page]
        found: list[Move] = []
        for page, offset, start, size in self._spans(first, count):
            rows = page.tier.rows(offset, size, self.width, self._dtype)
            found.append(Move(rows, device[start : start + size] if size < count else device))
        return found, self._pages[first // self._per_page : -(-(first + count) // self._per_page)]

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

    def runs_in_memory(self, count: int, first: int = 0) -> list[tuple[int, Tensor]]:
        """Rows from `first` up to `count` where they lie, as few ``[n, W]`` as pages allow, each with its first index.

        Waits for those that are on the way there.
        """
        for page in self._pages[first // self._per_page : -(-count // self._per_page)]:
            if page.written is not None:
                page.written.settle()
        found = []
        for page, offset, start, size in self._spans(first, count - first):
            rows = page.tier.rows(offset, size, self.width, self._dtype)
            if isinstance(rows, MemoryRows):
                found.append((first + start, rows.rows))
            else:
                # A shared page that was in memory may have been copied to disk since these rows were counted.
                copied = torch.empty(size, self.width, dtype=self._dtype)
                rows.read_into(copied)
                found.append((first + start, copied))
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
        twin = PagedRows(self._pool, self.width, self._dtype, layer=self._layer, only=self._only)
        twin.length = self.length
        twin._pages, twin._leading = list(self._pages), self._leading
        for page in twin._pages:
            page.users += 1
        return twin


def mark_written(pages: list[Page], ticket: Ticket) -> None:
    """Note the transfer that writes to pages, so that whoever reads them waits for it."""
    for page in pages:
        page.written = ticket


def mark_read(pages: list[Page], ticket: Ticket) -> None:
    """Note the transfer that reads pages, so that whoever writes to them next waits for it."""
    for page in pages:
        page.read = ticket


def unread(pages: list[Page]) -> list[Ticket]:
    """Transfers out of pages that have not ended yet."""
    reads = {id(page.read): page.read for page in pages if page.read is not None}
    return [ticket for ticket in reads.values() if not ticket.done]


def unwritten(pages: list[Page]) -> list[Ticket]:
    """Transfers into pages that have not ended yet."""
    tickets: dict[int, Ticket] = {}
    for page in pages:
        if page.written is not None:
            if page.written.done:
                continue
            tickets[id(page.written)] = page.written
    return list(tickets.values())
