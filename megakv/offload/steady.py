"""Plain streaming, and the methods that keep link, accelerator and host busy at once, many layers in a row."""

from __future__ import annotations

from megakv.offload.method import Split, steady_split
from megakv.offload.prices import GroupPrices


class Stream:
    """All keys and values are sent: ``t = kv s'``."""

    recomputes = attends_on_host = False

    def split(self, prices: GroupPrices) -> Split | None:
        return Split(prices.tokens, resident=prices.resident, chunk=prices.chunk)


class Chunked:
    """Some are recomputed from chunks as they land, many layers in a row: ``t = max(x l + kv (s' - l), c l)``."""

    recomputes, attends_on_host = True, False

    def split(self, prices: GroupPrices) -> Split | None:
        return steady_split(prices, recompute=True, host=False) if prices.inputs else None


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
