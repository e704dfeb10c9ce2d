"""The pages that tiers are cut into, all of one size.

Pages of one size leave no gaps that cannot be used again. Those taken one after the other lie one behind the other, so
that a prompt's rows move in few large copies.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from megakv.errors import MegaKVError
from megakv.offload.disk import DiskTier
from megakv.offload.link import Ticket
from megakv.offload.tiers import Tier, in_units


@dataclass
class Page:
    """A page that some rows lie in.

    Parameters
    ----------
    tier : Tier
    offset : int
        Its first byte in the tier.
    users : int
        Sequences that share it; one with several is copied before it is written to.
    written : Ticket, optional
        The last transfer into it, perhaps its user's before.
    read : Ticket, optional
        The last one out of it, which whoever writes to it waits for.
    layer : int
        Whose share of the tier it is counted in.
    """

    tier: Tier
    offset: int
    users: int = 1
    written: Ticket | None = None
    read: Ticket | None = None
    layer: int = 0

    @property
    def busy(self) -> list[Ticket]:
        """Transfers into it and out of it that have not ended."""
        return [ticket for ticket in (self.written, self.read) if ticket is not None and not ticket.done]


@dataclass
class _Free:
    """Unused pages of a tier: those given back, lowest first, then those never used."""

    returned: list[int] = field(default_factory=list)
    busy: dict[int, tuple[Ticket | None, Ticket | None]] = field(default_factory=dict)
    fresh: int = 0


class PagePool:
    """The pages of all tiers, taken from the first tier that has any.

    Layers share every tier but the last one evenly: each has its first rows in memory, and what one brings from the
    disk is brought while another computes.

    Parameters
    ----------
    tiers : sequence of Tier
        Fastest first.
    page_bytes : int
    layers : int
    """

    def __init__(self, tiers: Sequence[Tier], page_bytes: int, *, layers: int = 1):
        self.tiers = tuple(tiers)
        self.page_bytes = page_bytes
        self._free = [_Free() for _ in tiers]
        self._index = {id(tier): index for index, tier in enumerate(tiers)}
        self._capacity = [tier.budget // page_bytes for tier in tiers]
        self._held = [[0] * layers for _ in tiers]

    @property
    def capacity(self) -> int:
        """Pages of all tiers."""
        return sum(self._capacity)

    def used(self) -> dict[str, int]:
        """Bytes in use by tier."""
        return {
            tier.name: (free.fresh - len(free.returned)) * self.page_bytes
            for tier, free in zip(self.tiers, self._free, strict=True)
        }

    @property
    def disk(self) -> DiskTier | None:
        """The disk tier; None without one."""
        return next((tier for tier in self.tiers if isinstance(tier, DiskTier)), None)

    @property
    def disk_io(self) -> str | None:
        """How the disk tier is read; None without one."""
        return None if self.disk is None else self.disk.io

    def free_bytes(self, only: Tier | None = None) -> int:
        """Bytes of the pages that nobody uses, of all tiers or of one."""
        used = self.used()
        return sum(
            capacity * self.page_bytes - used[tier.name]
            for tier, capacity in zip(self.tiers, self._capacity, strict=True)
            if only is None or tier is only
        )

    def has_room(self, nbytes: int, only: Tier | None = None) -> bool:
        """Whether so many bytes can be taken, of all tiers or of one."""
        if nbytes > self.free_bytes(only):
            # Caches that nobody holds any more may still wait for the garbage collector.
            gc.collect()
        return nbytes <= self.free_bytes(only)

    def budgets(self) -> str:
        """The settings and their sizes, for messages."""
        return ", ".join(f"megakv.offload.{tier.name}_gb holds {in_units(tier.budget)}" for tier in self.tiers)

    def take(self, layer: int = 0, only: Tier | None = None) -> Page:
        """A page of its own, for a layer.

        Parameters
        ----------
        layer : int
        only : Tier, optional
            Where it must lie.

        Raises
        ------
        MegaKVError
            If all budgets are used up, with the numbers.
        """
        page = self._take(layer, only)
        if page is None:
            # Caches that nobody holds any more may still wait for the garbage collector.
            gc.collect()
            page = self._take(layer, only)
        if page is None:
            raise MegaKVError(
                f"the offloaded keys and values outgrow their budgets: {self.budgets()}, all of it is in use"
            )
        return page

    def give(self, page: Page) -> None:
        """One user less; without any, the page is free."""
        page.users -= 1
        if page.users == 0:
            index = self._index[id(page.tier)]
            free = self._free[index]
            self._held[index][page.layer] -= 1
            heapq.heappush(free.returned, page.offset)
            if page.busy:
                # A freed page may still have a copy in flight: its next user waits for it.
                free.busy[page.offset] = page.written, page.read

    def _take(self, layer: int, only: Tier | None) -> Page | None:
        # Once the last tier is full, shares count no more.
        for fair in (True, False):
            for index, tier in enumerate(self.tiers):
                if (only is None or tier is only) and not (fair and self._has_share(index, layer)):
                    page = self._page(index, layer)
                    if page is not None:
                        self._held[index][layer] += 1
                        return page
        return None

    def _has_share(self, index: int, layer: int) -> bool:
        """Whether a layer has its share of a tier that is not the last."""
        held = self._held[index]
        return index + 1 < len(self.tiers) and held[layer] >= (self._capacity[index] + len(held) - 1 - layer) // len(
            held
        )

    def _page(self, index: int, layer: int) -> Page | None:
        tier, free = self.tiers[index], self._free[index]
        if free.returned:
            offset = heapq.heappop(free.returned)
            written, read = free.busy.pop(offset, (None, None))
            return Page(tier, offset, written=written, read=read, layer=layer)
        if free.fresh < self._capacity[index]:
            free.fresh += 1
            return Page(tier, (free.fresh - 1) * self.page_bytes, layer=layer)
        return None

    def close(self) -> None:
        """Give the tiers back."""
        for tier in self.tiers:
            tier.close()
