"""What transformers asks of a cache and its layers. New keys and values pass through: attention stores them."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from megakv.base.errors import MegaKVError


class LayerView(CacheLayerMixin):
    """A layer of the length of its cache."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: TransformersCache):
        super().__init__()
        # Weakly: memory of a cache that nobody holds is free at once, not when the garbage collector finds the circle.
        self._cache = weakref.proxy(cache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return -1


class TransformersCache(Cache):
    """A cache of global length, by transformers' names for what is done to it.

    `length` are the slots that are cached; it cannot be cut back to less than `reach` of them, unless to none.
    """

    is_compileable = False

    def __init__(self, layers: int):
        # All are of one length: one view does, as every pass over several caches makes a cache.
        super().__init__(layers=[LayerView(self)] * layers)
        self.length, self.reach = 0, 0

    @abstractmethod
    def cut_back(self, slots: int) -> None:
        """Forget all tokens at `slots` and beyond."""

    @property
    @abstractmethod
    def batch_size(self) -> int: ...

    @abstractmethod
    def _reindex(self, index: list[int]) -> None:
        """Sequence b becomes the present sequence ``index[b]``."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        # transformers before 5.18 passes the final length, later ones a negative number of tokens to remove.
        slots = self.length + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        if slots >= self.length:
            # As after candidates that were all right: what is on its way for the next step is of use.
            return
        if 0 < slots < self.reach:
            raise MegaKVError(
                f"the cache cannot be cut back to {slots} tokens: sliding windows see earlier ones, which were freed, "
                f"or some were evicted later; keep {self.reach} or more, or none"
            )
        self.cut_back(slots)

    def reset(self) -> None:
        self.cut_back(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._reindex(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._reindex([row for row in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.arange(self.batch_size)[indices.cpu()]
        self._reindex(rows.tolist())
