"""Plain streaming: what every other method must beat."""

from __future__ import annotations

from megakv.offload.equations import GroupCosts
from megakv.offload.method import Split


class Stream:
    """All keys and values are sent: ``t = kv s'``."""

    recomputes = attends_on_host = False

    def split(self, costs: GroupCosts) -> Split | None:
        return Split(costs.tokens, resident=costs.resident, chunk=costs.chunk)
