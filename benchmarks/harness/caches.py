"""Caches that hold a given number of tokens without a prefill: random keys and values, the same for every method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from megakv.cache.cache import ShardedCache
from megakv.distributed.sharding import balanced, new_tokens

from .world import World


def random_layers(model: PreTrainedModel, batch: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """``[B, K, S, D]`` keys and values of each layer, the same on every rank."""
    config = model.config
    generator = torch.Generator().manual_seed(2)
    shape = (batch, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads)
    for _ in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, generator=generator).to(model.device, model.dtype) for _ in range(2))
        yield keys, values


def sharded_cache(model: PreTrainedModel, world: World, *, batch: int, tokens: int) -> ShardedCache:
    """This rank's share of such a cache, load-balanced as after one prefill of all tokens."""
    cache = ShardedCache(model.config.num_hidden_layers, size=world.size, rank=world.rank)
    if tokens == 0:
        return cache
    positions = np.broadcast_to(np.arange(tokens), (batch, tokens))
    cache.begin(balanced(new_tokens(np.ones((batch, tokens), dtype=bool), positions, 0), world.size), batch)
    for layer, (keys, values) in enumerate(random_layers(model, batch, tokens)):
        for sequence in range(batch):
            slots = torch.from_numpy(cache.table.slots(world.rank, sequence)).to(model.device)
            if len(slots):
                cache.store(layer).append(sequence, keys[sequence][:, slots], values[sequence][:, slots])
    cache.commit(tokens)
    return cache


class RoomyLayer(DynamicLayer):
    """A layer with room for further tokens: they are written in place, where `DynamicLayer` copies all it holds."""

    def __init__(self, keys: Tensor, values: Tensor, room: int):
        super().__init__()
        self.lazy_initialization(keys, values)
        self._held = keys.shape[2]
        shape = (*keys.shape[:2], self._held + room, keys.shape[3])
        self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, :, : self._held] = keys
        self._values[:, :, : self._held] = values
        self.rewind()

    def rewind(self) -> None:
        """Hold what it held at first."""
        self._view(self._held)

    def first(self) -> tuple[Tensor, Tensor]:
        """``[B, K, S, D]`` what it held at first, in its own memory."""
        return self._keys[:, :, : self._held], self._values[:, :, : self._held]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        self._keys[:, :, start:end] = key_states
        self._values[:, :, start:end] = value_states
        self._view(end)
        return self.keys, self.values

    def _view(self, length: int) -> None:
        self.keys, self.values = self._keys[:, :, :length], self._values[:, :, :length]


class RoomyCache(Cache):
    """A transformers cache of such layers, random at first."""

    def __init__(self, model: PreTrainedModel, *, batch: int, tokens: int, room: int):
        super().__init__(layers=[RoomyLayer(*pair, room) for pair in random_layers(model, batch, tokens)])

    def rewind(self) -> None:
        """Hold what it held at first."""
        for layer in self.layers:
            layer.rewind()


class CopyingCache(Cache):
    """transformers' own growing cache, over the memory of another."""

    def __init__(self, source: RoomyCache):
        super().__init__(layers=[DynamicLayer() for _ in source.layers])
        self._source = source
        self.rewind()

    def rewind(self) -> None:
        """Hold what the source held at first."""
        for layer, source in zip(self.layers, self._source.layers, strict=True):
            keys, values = source.first()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
