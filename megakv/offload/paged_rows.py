"""The rows of one sequence and layer, spread over some pages.

Those that lie one behind the other are joined, so that a prompt's rows move in few large copies.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from megakv.base.errors import MegaKVError
from megakv.costmodel.stored_rows import page_bytes
from megakv.offload.disk import FileRows
from megakv.offload.host_memory import HostTier
from megakv.offload.link import Move
from megakv.offload.pages import Page, PagePool, Tier

Runs = list[tuple[int, Tensor]]
"""Rows where they lie on the host: runs ``[n, W]`` in ascending order, each with the index of its first row."""


@dataclass
class Stretch:
    """Pages of rows that lie one behind the other in a tier, from a row and a byte of it on."""

    first: int
    tier: Tier
    offset: int
    pages: list[Page]
    rows_per_page: int
    page_bytes: int

    @property
    def end(self) -> int:
        """The row behind the last one that has room."""
        return self.first + len(self.pages) * self.rows_per_page

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.page_bytes


class PagedRows:
    """A growing number of rows of one width and type, of a layer; forks share pages until either grows.

    The format is that of the first rows that come, where it is not given. `length` counts all rows, the first `gone`
    ones that are not held any more included; `per_page` go into a page. `joined` are the pages, and `version` is
    another one when there are others.
    """

    dtype: torch.dtype

    def __init__(self, pool: PagePool, width: int = 0, dtype: torch.dtype | None = None, *, layer: int = 0):
        self.length = self.gone = 0
        self.version = object()
        self._layer, self._pool = layer, pool
        self._pages: list[Page] = []
        self.joined: list[Stretch] = []
        # Pages before those, of which no row is held, and leading pages that are known to lie in memory.
        self._given = self._leading = 0
        # Rows without elements need no page.
        self.known, self.width, self._row_bytes, self.per_page = False, 0, 0, sys.maxsize
        if dtype is not None:
            self.set_format(width, dtype)

    def set_format(self, width: int, dtype: torch.dtype) -> None:
        """Take the format of all rows, before any comes."""
        self.known, self.width, self.dtype = True, width, dtype
        self._row_bytes = width * dtype.itemsize
        self.per_page = self._pool.page_bytes // self._row_bytes if width else sys.maxsize
        page_bytes(0, self._row_bytes, self._pool.page_bytes)
        self._given = self._leading = self.gone // self.per_page

    def __del__(self) -> None:
        for page in getattr(self, "_pages", ()):
            self._pool.give(page)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, room in the last one included."""
        return len(self._pages) * self._pool.page_bytes

    def _rows(self, page: Page, offset: int, count: int) -> Tensor | FileRows:
        return page.tier.rows(offset, count, self.width, self.dtype)

    def _lying(self, page: Page, offset: int, count: int) -> Tensor:
        """Rows where they lie in memory, or a copy of those that lie on disk."""
        rows = self._rows(page, offset, count)
        if isinstance(rows, Tensor):
            return rows
        copied = torch.empty(count, self.width, dtype=self.dtype)
        rows.read_into(copied)
        return copied

    def extend(self, count: int) -> int:
        """Make room for rows behind the present ones, which stay as they were where the budgets are used up.

        Returns the first one's index.
        """
        if self._pages and self._pages[-1].users == 1:
            # Each step of decoding adds a row to every sequence in every layer: in little time.
            end = self.length + count
            if end <= (self._given + len(self._pages)) * self.per_page:
                self.length = end
                return end - count
        first, needed = self.length, -(-(self.length + count) // self.per_page) - self._given if self.width else 0
        taken: list[Page] = []
        try:
            inner = first % self.per_page
            if count and inner and self._pages and self._pages[-1].users > 1:
                self._replace_last(inner)
            while len(self._pages) + len(taken) < needed:
                taken.append(self._pool.take(self._layer))
        except MegaKVError:
            for page in taken:
                self._pool.give(page)
            raise
        self._pages += taken
        self._join(taken)
        self.length += count
        return first

    def _join(self, pages: Sequence[Page]) -> None:
        """The last ones follow those that are joined."""
        self.version = object()
        size, joined = self._pool.page_bytes, self.joined
        # Nothing is left over at the end of a page.
        dense = self._row_bytes * self.per_page == size
        for index, page in enumerate(pages, start=self._given + len(self._pages) - len(pages)):
            last = joined[-1] if joined else None
            if last and dense and last.tier is page.tier and last.offset + last.nbytes == page.offset:
                last.pages.append(page)
            else:
                joined.append(Stretch(index * self.per_page, page.tier, page.offset, [page], self.per_page, size))

    def _join_anew(self) -> None:
        self.joined = []
        self._join(self._pages)

    def _replace_last(self, rows: int) -> None:
        """A page of one's own in the place of a shared last page that is partly filled."""
        shared, own = self._pages[-1], self._pool.take(self._layer)
        # The host itself writes at once, whatever the link has queued.
        for transfer in (*shared.busy, *own.busy):
            transfer.settle()
        found, place = self._lying(shared, shared.offset, rows), self._rows(own, own.offset, rows)
        if isinstance(place, Tensor):
            place.copy_(found)
        else:
            place.write_from(found)
        self._pages[-1] = own
        self._join_anew()
        self._leading = min(self._leading, self._given + len(self._pages) - 1)
        self._pool.give(shared)

    def append(self, rows: Tensor) -> list[Move]:
        """Copies of rows ``[n, W]`` to their place behind the present ones."""
        return self.moves(self.extend(len(rows)), rows.contiguous())

    def moves(self, first: int, device: Tensor) -> list[Move]:
        """Copies between rows from `first` on and device memory ``[n, W]``, as few as pages allow."""
        return [
            Move.of(self._rows(pages[0], offset, last - start), device[start - first : last - first], pages)
            for pages, offset, start, last in self._runs(first, first + len(device))
        ]

    def pages_of(self, first: int, count: int) -> list[Page]:
        """Those that so many rows from one on lie in."""
        low, last = first // self.per_page - self._given, (first + count - 1) // self.per_page - self._given
        return self._pages[low : last + 1]

    def _runs(self, first: int, last: int) -> Iterator[tuple[list[Page], int, int, int]]:
        """Rows that lie one behind the other: their pages, the byte that they begin at, the first one, and the end."""
        joined, size = self.joined, self.per_page
        if first >= last or not self._row_bytes:
            return
        for index in range(bisect_right(joined, first, key=lambda stretch: stretch.first) - 1, len(joined)):
            stretch = joined[index]
            start, end = max(first, stretch.first), min(last, stretch.end)
            if start >= end:
                return
            before = start - stretch.first
            pages = stretch.pages[before // size : -(-(end - stretch.first) // size)]
            yield pages, stretch.offset + before * self._row_bytes, start, end

    def in_memory(self) -> int:
        """Leading rows that lie in memory, or are on the way there."""
        pages, given = self._pages, self._given
        while self._leading < given + len(pages) and isinstance(pages[self._leading - given].tier, HostTier):
            self._leading += 1
        return self.length if self._leading == given + len(pages) else self._leading * self.per_page

    def runs_in_memory(self, last: int, first: int = 0) -> Runs:
        """Rows from `first` up to `last`; waits for those that are on the way there."""
        runs = list(self._runs(first, last))
        for page in (page for pages, *_ in runs for page in pages):
            if page.written is not None:
                page.written.settle()
        # A shared page that was in memory may have been copied to disk since these rows were counted.
        return [(start, self._lying(pages[0], offset, end - start)) for pages, offset, start, end in runs]

    def truncate(self, length: int) -> None:
        """Keep the first rows only."""
        self.length = min(self.length, length)
        self.gone = min(self.gone, self.length)
        kept = -(-self.length // self.per_page)
        given = self._given
        self._given = min(given, kept)
        self._leading = min(self._leading, kept)
        self._give(slice(max(0, kept - given), None))

    def forget(self, rows: int) -> None:
        """Give whole pages of the first rows back, which nobody needs any more; before any came, they never will."""
        if not self.known:
            self.length = max(self.length, rows)
        self.gone = max(self.gone, min(rows, self.length))
        before, self._given = self._given, self.gone // self.per_page
        self._leading = max(self._leading, self._given)
        self._give(slice(self._given - before))

    def _give(self, pages: slice) -> None:
        given = self._pages[pages]
        for page in given:
            self._pool.give(page)
        del self._pages[pages]
        if given:
            self._join_anew()

    def fork(self) -> PagedRows:
        """The same rows; what is appended to one is not seen by the other."""
        twin = copy(self)
        twin._pages = list(self._pages)
        twin._join_anew()
        for page in twin._pages:
            page.users += 1
        return twin
