"""A turn of a conversation: new tokens on top of cached ones, by one prefill method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import megakv
from megakv.cache.cache import ShardedCache

from .prefills import ContextParallelPrefill


class Turn(ContextParallelPrefill):
    """One forward pass over a turn's new tokens that yields the last one's logits."""

    def __init__(self, name: str, engine: megakv.MegaKVEngine, ids: Tensor, cache: ShardedCache):
        super().__init__(name, engine, ids)
        self._cache = cache
        self._held = cache.length

    def prepare(self) -> None:
        self._cache.cut_back(self._held)

    @torch.no_grad()
    def run(self) -> Any:
        return self.model(input_ids=self._ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
