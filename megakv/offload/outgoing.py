"""Rows of one layer on their way from the accelerator to their tiers."""

from __future__ import annotations

from torch import Tensor

from megakv.offload.link import Link, Move, Ticket
from megakv.offload.pages import PagedRows, mark_written, unread
from megakv.offload.pool import Page


class OutgoingRows:
    """Rows that have their place in a tier and are sent there together."""

    def __init__(self) -> None:
        self._moves: list[Move] = []
        self._pages: list[Page] = []

    def add(self, paged: PagedRows, rows: Tensor) -> None:
        """Give rows ``[n, W]`` their place behind the present ones.

        Raises
        ------
        MegaKVError
            If the budgets are used up.
        """
        moves, pages = paged.moves(paged.extend(len(rows)), rows.contiguous())
        self._moves += moves
        self._pages += pages

    def send(self, link: Link) -> Ticket | None:
        """Begin to send what was added; None where nothing was."""
        if not self._moves:
            return None
        ticket = link.start("out", self._moves, after=unread(self._pages))
        mark_written(self._pages, ticket)
        self._moves, self._pages = [], []
        return ticket
