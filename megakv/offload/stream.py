"""Plain streaming: what every other method must beat."""

from __future__ import annotations

from megakv.offload.method import Split
from megakv.offload.prices import GroupPrices


class Stream:
    """All keys and values are sent: ``t = kv s'``."""

    recomputes = attends_on_host = False

    def split(self, prices: GroupPrices) -> Split | None:
        return Split(prices.tokens, resident=prices.resident, chunk=prices.chunk)
