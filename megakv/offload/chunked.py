"""KVPR with activations in chunks, each recomputed while the next one is on its way."""

from __future__ import annotations

from megakv.offload.method import Split, steady_split
from megakv.offload.prices import GroupPrices


class Chunked:
    """Some are recomputed from chunks as they land, many layers in a row: ``t = max(x l + kv (s' - l), c l)``."""

    recomputes, attends_on_host = True, False

    def split(self, prices: GroupPrices) -> Split | None:
        return steady_split(prices, recompute=True, host=False) if prices.inputs else None
