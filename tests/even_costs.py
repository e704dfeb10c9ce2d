"""A machine where recomputing and attending cost as much as sending: bytes divide tokens, not what else is running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from megakv.offload.prices import LayerPrices
from megakv.offload.rates import Rates


@contextmanager
def even_costs() -> Iterator[None]:
    """Engines that are used in here divide tokens by such costs, whatever this machine measures and its steps show."""
    measured = Rates.prices

    def layer(self: Rates, *args: Any, **options: Any) -> LayerPrices:
        found = measured(self, *args, **options)
        return replace(
            found,
            recompute_s=found.kv_s,
            launch_s=0.0,
            # 0 stands for a host that cannot attend.
            host_attend_s=found.kv_s if found.host_attend_s else 0.0,
            host_fixed_s=0.0,
            transfer_s=0.0,
            disk_kv_s=found.kv_s,
            disk_activation_s=found.activation_s,
        )

    with patch.multiple(Rates, prices=layer, learn=lambda self, *args: None):
        yield
