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
    """

    tier: Tier
    offset: int
    users: int = 1
    written: Ticket | None = None


@dataclass
class _Free:
    """Unused pages of a tier: those given back, lowest first, then those never used."""

    returned: list[int] = field(default_factory=list)
    written: dict[int, Ticket] = field(default_factory=dict)
    fresh: int = 0


class PagePool:
    """The pages of all tiers, taken from the first tier that has any.

    Parameters
    ----------
    tiers : sequence of Tier
        Fastest first.
    page_bytes : int
    """

    def __init__(self, tiers: Sequence[Tier], page_bytes: int):
        self.tiers = tuple(tiers)
        self.page_bytes = page_bytes
        self._free = [_Free() for _ in tiers]
        self._index = {id(tier): index for index, tier in enumerate(tiers)}
        self._capacity = [tier.budget // page_bytes for tier in tiers]

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
    def disk_io(self) -> str | None:
        """How the disk tier is read; None without one."""
        return next((tier.io for tier in self.tiers if tier.io is not None), None)

    def free_bytes(self) -> int:
        """Bytes of the pages that nobody uses."""
        return self.capacity * self.page_bytes - sum(self.used().values())

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes can be taken."""
        if nbytes > self.free_bytes():
            # Caches that nobody holds any more may still wait for the garbage collector.
            gc.collect()
        return nbytes <= self.free_bytes()

    def budgets(self) -> str:
        """The settings and their sizes, for messages."""
        return ", ".join(f"megakv.offload.{tier.name}_gb holds {in_units(tier.budget)}" for tier in self.tiers)

    def take(self) -> Page:
        """A page of its own.

        Raises
        ------
        MegaKVError
            If all budgets are used up, with the numbers.
        """
        page = self._take()
        if page is None:
            # Caches that nobody holds any more may still wait for the garbage collector.
            gc.collect()
            page = self._take()
        if page is None:
            raise MegaKVError(
                f"the offloaded keys and values outgrow their budgets: {self.budgets()}, all of it is in use"
            )
        return page

    def give(self, page: Page) -> None:
        """One user less; without any, the page is free."""
        page.users -= 1
        if page.users == 0:
            free = self._free[self._index[id(page.tier)]]
            heapq.heappush(free.returned, page.offset)
            if page.written is not None and not page.written.done:
                # Rows that nobody wants any more may still be on their way: the next user must know.
                free.written[page.offset] = page.written

    def _take(self) -> Page | None:
        for tier, free, capacity in zip(self.tiers, self._free, self._capacity, strict=True):
            if free.returned:
                offset = heapq.heappop(free.returned)
                return Page(tier, offset, written=free.written.pop(offset, None))
            if free.fresh < capacity:
                free.fresh += 1
                return Page(tier, (free.fresh - 1) * self.page_bytes)
        return None

    def close(self) -> None:
        """Give the tiers back."""
        for tier in self.tiers:
            tier.close()
