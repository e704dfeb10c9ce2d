"""The host's processor as one more rank: it attends to tokens where they lie, and its part is merged."""

from __future__ import annotations

from megakv.offload.method import Split, steady_split
from megakv.offload.prices import GroupPrices


class CPURank:
    """The host attends to some where they lie, and the others are sent: ``t = max(kv (s' - a), d + h a)``."""

    recomputes, attends_on_host = False, True

    def split(self, prices: GroupPrices) -> Split | None:
        return steady_split(prices, recompute=False, host=True) if prices.host or prices.kept_on_host else None


class All:
    """`chunked` and `cpu_rank` at once: ``t = max(x l + kv (s' - l - a), d + c l + h a)``."""

    recomputes = attends_on_host = True

    def split(self, prices: GroupPrices) -> Split | None:
        # Also of what has no activations, as where they cannot pay.
        hosted = prices.host or prices.kept_on_host
        return steady_split(prices, recompute=True, host=True) if hosted else None
