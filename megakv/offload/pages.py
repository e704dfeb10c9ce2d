"""The pages that host memory and the disk are cut into.

Pages are of one size, so they leave no gaps that cannot be used again. Those taken one after the other lie one behind
the other.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from megakv.base.errors import MegaKVError, in_units
from megakv.offload.config import OffloadConfig
from megakv.offload.disk import DiskTier
from megakv.offload.host_memory import HostTier
from megakv.offload.link import Place
from megakv.offload.weights import LayerWeights

Tier = HostTier | DiskTier


@dataclass(kw_only=True)
class Page(Place):
    """A page from a byte of its tier on; transfers into it and out of it may be its user's before.

    `users` are sequences that share it: one with several is copied before it is written to. It is counted in a layer's
    share of the tier.
    """

    tier: Tier
    offset: int
    layer: int
    users: int = 1


@dataclass
class _TierPages:
    """A tier's pages: how many there are, how many each layer holds, and those given back, which go first.

    From number `fresh` on none was ever used.
    """

    tier: Tier
    capacity: int
    held: list[int]
    returned: list[tuple[int, Page]] = field(default_factory=list)
    fresh: int = 0

    def over_share(self, layer: int) -> bool:
        """Whether a layer has all of its share, as equal as whole pages allow."""
        return self.held[layer] >= (self.capacity + len(self.held) - 1 - layer) // len(self.held)

    def take(self, layer: int, page_bytes: int) -> Page | None:
        if self.returned:
            _, page = heapq.heappop(self.returned)
            page.users, page.layer = 1, layer
        elif self.fresh < self.capacity:
            page = Page(tier=self.tier, offset=self.fresh * page_bytes, layer=layer)
            self.fresh += 1
        else:
            return None
        self.held[layer] += 1
        return page


class PagePool:
    """The pages of all tiers, the fastest first, taken from the first tier that has any.

    Layers share every tier but the last one evenly: each has its first rows in memory, and what one brings from the
    disk is brought while another computes.
    """

    def __init__(self, tiers: Sequence[Tier], page_bytes: int, *, layers: int = 1):
        self.tiers = tuple(tiers)
        self.page_bytes = page_bytes
        self._pages = [_TierPages(tier, tier.budget // page_bytes, [0] * layers) for tier in tiers]

    @property
    def capacity(self) -> int:
        """Pages of all tiers."""
        return sum(pages.capacity for pages in self._pages)

    def used(self) -> dict[str, int]:
        """Bytes in use by tier."""
        return {pages.tier.name: sum(pages.held) * self.page_bytes for pages in self._pages}

    @property
    def disk(self) -> DiskTier | None:
        return next((tier for tier in self.tiers if isinstance(tier, DiskTier)), None)

    def free_bytes(self, only: Tier | None = None) -> int:
        """Bytes of the pages that nobody uses, of all tiers or of one."""
        free = (each.capacity - sum(each.held) for each in self._pages if only is None or each.tier is only)
        return sum(free) * self.page_bytes

    def check_capacity(self, needed: int, held: int, tokens: str) -> None:
        """Refuse a generation that needs more bytes, some of which it holds already, than are free for it."""
        if needed - held > self.free_bytes():
            # Caches that nobody holds any more may still wait for the garbage collector.
            gc.collect()
        free = self.free_bytes() + held
        if needed > free:
            raise MegaKVError(
                f"this generation needs {in_units(needed)} for offloaded keys and values on a rank ({tokens}), but "
                f"{self.budgets()}, of which {in_units(free)} can be used; raise megakv.offload.host_gb or disk_gb, "
                f"lower megakv.offload.page_kib = {self.page_bytes >> 10} if sequences are short, or ask for fewer "
                "tokens"
            )

    def budgets(self) -> str:
        """The settings and their sizes, for messages."""
        return ", ".join(f"megakv.offload.{tier.name}_gb holds {in_units(tier.budget)}" for tier in self.tiers)

    def take(self, layer: int = 0) -> Page:
        """A page for a layer; a MegaKVError where all budgets are used up."""
        page = self._take(layer)
        if page is None:
            # Caches that nobody holds any more may still wait for the garbage collector.
            gc.collect()
            page = self._take(layer)
        if page is None:
            raise MegaKVError(
                f"the offloaded keys and values outgrow their budgets: {self.budgets()}, all of it is in use"
            )
        return page

    def give(self, page: Page) -> None:
        """One user less; without any, the page is free. Its next user waits for what is still copied to or from it."""
        page.users -= 1
        if page.users == 0:
            pages = next(each for each in self._pages if each.tier is page.tier)
            pages.held[page.layer] -= 1
            if not page.busy:
                page.written = page.read = None
            heapq.heappush(pages.returned, (page.offset, page))

    def _take(self, layer: int) -> Page | None:
        # Once the last tier is full, shares count no more.
        for fair in (True, False):
            for pages in self._pages:
                limited = fair and pages is not self._pages[-1] and pages.over_share(layer)
                page = None if limited else pages.take(layer, self.page_bytes)
                if page is not None:
                    return page
        return None


def made_tiers(config: OffloadConfig, weights: LayerWeights | None, *, pin: bool, made: ExitStack) -> list[Tier]:
    """Host memory and, where its budget holds a page, a file, without what weights have taken; `made` ends them."""
    held, disk = (0, None) if weights is None else (weights.host_bytes, weights.disk)
    page, left = config.page_kib << 10, config.disk_bytes - (0 if disk is None else disk.budget)
    tiers: list[Tier] = [HostTier(config.host_bytes - held, pin=pin, unit=page)]
    made.callback(tiers[0].close)
    if left >= page:
        tiers.append(DiskTier(left, config.disk_path))
        made.callback(tiers[1].close)
    return tiers
