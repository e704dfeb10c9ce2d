"""KVPR (Section 3.2): the keys and values of the first tokens are recomputed while those of the others are sent.

In the i-th layer the activations of ``l`` of ``s'`` tokens are sent, ``M_X[0:l] = b l h p`` bytes, and the keys and
values of the others, ``M_KV[l:s'] = 2 b (s' - l) h p`` bytes (Equation 6). Recomputing, ``K = X W_K`` and ``V = X W_V``
(Equation 7), takes ``4 b l h^2`` operations (Equation 8) at ``v_gpu`` a second, t_recomp (Equation 9). Then

    t(l) = M_X[0:l] / v_com + max(t_recomp, M_KV[l:s'] / v_com)        (Equation 10)

is to be least (Equation 11). `LayerPrices` has the factors of l and s' - l, which are fitted as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from megakv.offload.method import Split, lowest
from megakv.offload.prices import Counts, GroupPrices


def split_seconds(prices: GroupPrices, recomputed: Counts) -> Any:
    """Equation 10, with what each transfer and each recomputation costs at all, and weights where they are sent."""
    layer, recomputing, streaming = prices.layer, recomputed > 0, (recomputed < prices.away) | (prices.kept_here > 0)
    inputs_s, rows_s = prices.sent_seconds(recomputed)
    landed = layer.head_s + recomputing * layer.transfer_s + inputs_s
    recompute_s = recomputing * layer.launch_s + layer.recompute_s * recomputed
    return landed + np.maximum(recompute_s, layer.tail_s + streaming * layer.transfer_s + rows_s)


def split_point(prices: GroupPrices) -> int:
    """Equation 11: recomputing rises with l and sending falls, so it is where they meet; on disk it is searched for."""
    layer, limit = prices.layer, min(prices.away, prices.inputs)
    if prices.placements:
        return lowest(lambda points: split_seconds(prices, points), limit, max(1, prices.tokens))
    meeting = layer.tail_s + layer.transfer_s + layer.kv_s * prices.away + prices.kept_s - layer.launch_s
    slope = layer.recompute_s + layer.kv_s
    best = math.floor(meeting / slope) if slope else 0
    points = {0, 1, best, best + 1, prices.away - 1, limit}
    # Where activations take longer to send than keys and values, an end is best.
    return min(sorted(point for point in points if 0 <= point <= limit), key=lambda point: split_seconds(prices, point))


class KVPR:
    """Some keys and values are recomputed from activations that come whole: ``t = x l + max(c l, kv (s' - l))``."""

    recomputes, attends_on_host = True, False

    def split(self, prices: GroupPrices) -> Split | None:
        if not prices.inputs:
            return None
        whole = replace(prices, chunk=max(1, prices.tokens))
        return Split(prices.tokens, split_point(whole), resident=prices.resident, chunk=whole.chunk)
