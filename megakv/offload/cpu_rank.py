"""The host's processor as one more rank: it attends to tokens where they lie, and its part is merged."""

from __future__ import annotations

from megakv.offload.equations import GroupCosts
from megakv.offload.method import Split, steady_split


class CPURank:
    """The host attends to some where they lie, and the others are sent: ``t = max(kv (s' - a), d + h a)``."""

    recomputes, attends_on_host = False, True

    def split(self, costs: GroupCosts) -> Split | None:
        return steady_split(costs, recompute=False, host=True) if costs.host or costs.kept_on_host else None


class All:
    """`chunked` and `cpu_rank` at once: ``t = max(x l + kv (s' - l - a), c l, d + h a)``."""

    recomputes = attends_on_host = True

    def split(self, costs: GroupCosts) -> Split | None:
        # Also of what has no activations, as where they cannot pay.
        hosted = costs.host or costs.kept_on_host
        return steady_split(costs, recompute=True, host=True) if hosted else None
