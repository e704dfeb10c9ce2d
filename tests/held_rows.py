"""Rows that caches hold, which never change."""

from typing import Any

import torch

Rows = dict[tuple[int, int, int], torch.Tensor]
"""Key and value of each layer's heads' tokens, by layer, head and row."""


def check_rows(cache: Any, known: Rows, most: int) -> None:
    """What is held of the first sequence, fewer than `most` tokens of a head on average, is what was first there; new
    rows are noted.
    """
    for layer in range(len(cache)):
        counts = cache.store(layer).kept(0)
        assert counts.sum() < len(counts) * most
        for head, keys, values, rows in cache.store(layer).pieces(0):
            both = torch.cat([keys, values], dim=1)
            for row, found in zip(rows.tolist(), both, strict=True):
                first = known.setdefault((layer, head, row), found.clone())
                assert torch.equal(first, found), (layer, head, row)
