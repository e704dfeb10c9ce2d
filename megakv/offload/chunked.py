"""KVPR with activations in chunks, each recomputed while the next one is on its way."""

from __future__ import annotations

from megakv.offload.equations import GroupCosts
from megakv.offload.method import Split, steady_split


class Chunked:
    """Some are recomputed from chunks as they land, many layers in a row: ``t = max(x l + kv (s' - l), c l)``."""

    recomputes, attends_on_host = True, False

    def split(self, costs: GroupCosts) -> Split | None:
        return steady_split(costs, recompute=True, host=False) if costs.inputs else None
