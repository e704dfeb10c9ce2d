"""Predicted seconds of the attention kernel's calls for one layer's heads, from the tables of a hardware profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from megakv.attention.backends import PACKED_ROWS
from megakv.attention.visibility import MASKED_ROWS, WINDOW_ROWS
from megakv.costmodel.curves import AttentionTable, RaggedCall, RaggedTable
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.shape import AttentionShape

CALL_TOKENS = 512
"""Tokens of a call that shows what each of them takes."""
Table = TypeVar("Table", AttentionTable, RaggedTable)


class Kernels:
    """Kernel calls of one layer on the rank with the most heads."""

    def __init__(self, profile: HardwareProfile, shape: AttentionShape):
        self.shape, self._matmul = shape, profile.matmul
        self._table = _nearest(profile, shape, shape.group)
        self._packed_table = _nearest(profile, shape, 1)

    @property
    def flops(self) -> float:
        """Operations per second of large blocks of this shape: C of the papers' equations."""
        return self._table.flops

    def block(self, rows: float, keys: float) -> float:
        """Seconds of a call in which every row sees every key; 0 for an empty one.

        Latents are expanded for it. Those of a `square` are a rank's own, which its projections count in any case.
        """
        if rows <= PACKED_ROWS and self.shape.group > 1 and self.shape.kernel == "flash":
            return self._scaled(self._packed_table, self.shape.kv_heads, rows * self.shape.group, keys)
        expanded_s = self.shape.expansion * self._matmul.at(keys) if self.shape.latent and rows and keys else 0.0
        return self._scaled(self._table, self.shape.heads, rows, keys) + expanded_s

    def square(self, rows: float) -> float:
        return self._table.square(self.shape.heads * self.shape.head_dim / self._table.head_dim, rows)

    def windowed(self, rows: float, keys: float, *, parts: int = 1) -> float:
        """Seconds of rows that each see a window of at most `keys` keys: tiles of rows, each with its own keys.

        Of every window, each of the `parts` ranks that keys are spread over has about an N-th.
        """
        window = self.shape.window
        assert window is not None
        if rows <= 0:
            return 0.0
        tile = min(rows, max(WINDOW_ROWS, min(window // 4, MASKED_ROWS)))
        return rows / tile * self.block(tile, min(keys, (window + tile) / parts))

    def _scaled(self, table: AttentionTable, heads: int, rows: float, keys: float) -> float:
        return table.block(heads * self.shape.head_dim / table.head_dim, max(rows, 1.0) if rows else 0.0, keys)


def ragged_call(profile: HardwareProfile, shape: AttentionShape) -> RaggedCall:
    """Decode attention to KV heads that keep unequal numbers of tokens; `shape` says how many query heads share one.

    Where it was not measured, that of dense heads with as many tokens.
    """
    if profile.ragged:
        return _closest(profile.ragged, shape, shape.group).call
    kernels = Kernels(profile, replace(shape, heads=shape.group, kv_heads=1, latent=None, row_dim=None))
    # What a call costs by itself is paid once for all heads.
    call_s = kernels.block(1, 1)
    token_s = (kernels.block(1, CALL_TOKENS) - call_s) / (CALL_TOKENS - 1)
    return RaggedCall(call_s, 0.0, token_s, profile.straggle)


def _nearest(profile: HardwareProfile, shape: AttentionShape, group: int) -> AttentionTable:
    """The measured table that is closest in head dimension, then in the size of the group."""
    tables = [table for table in profile.attention if table.kernel == shape.kernel]
    tables = tables or [table for table in profile.attention if table.kernel == "flash"]
    return _closest(tables, shape, group)


def _closest(tables: Sequence[Table], shape: AttentionShape, group: int) -> Table:
    def distance(table: Table) -> tuple[float, float]:
        return abs(math.log(table.head_dim / shape.head_dim)), abs(math.log(table.group / group))

    return min(tables, key=distance)
