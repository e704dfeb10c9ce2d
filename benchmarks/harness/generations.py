"""Greedy generation by every method, through the `generate` that its users call, and caches that need no prefill."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from megakv.cache.cache import ShardedCache
from megakv.distributed.sharding import balanced, new_tokens

from .prefills import counting_sums, shared_memory_sums
from .sampling import Bytes, Method
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
        self._whole = tuple(
            torch.cat([each, each.new_empty(*each.shape[:2], room, each.shape[3])], 2) for each in (keys, values)
        )
        self.rewind()

    def rewind(self) -> None:
        self.keys, self.values = self.first()

    def first(self) -> list[Tensor]:
        """``[B, K, S, D]`` what it held at first, in its own memory."""
        return [whole[:, :, : self._held] for whole in self._whole]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        for whole, new in zip(self._whole, (key_states, value_states), strict=True):
            whole[:, :, start:end] = new
        self.keys, self.values = (whole[:, :, :end] for whole in self._whole)
        return self.keys, self.values


class RoomyCache(Cache):
    """A transformers cache of such layers, random at first."""

    def __init__(self, model: PreTrainedModel, *, batch: int, tokens: int, room: int):
        super().__init__(layers=[RoomyLayer(*pair, room) for pair in random_layers(model, batch, tokens)])

    def rewind(self) -> None:
        for layer in self.layers:
            layer.rewind()


class CopyingCache(Cache):
    """transformers' own growing cache, over the memory of another."""

    def __init__(self, source: RoomyCache):
        super().__init__(layers=[DynamicLayer() for _ in source.layers])
        self._source = source
        self.rewind()

    def rewind(self) -> None:
        for layer, source in zip(self.layers, self._source.layers, strict=True):
            layer.lazy_initialization(*source.first())
            layer.keys, layer.values = source.first()


class StepClock(LogitsProcessor):
    """Notes when the logits of each step are there: transformers calls it before it chooses a token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        get_accelerator().synchronize()
        self.times.append(time.perf_counter())
        return scores


class Generation(Method):
    """Generate a fixed number of tokens by a model's own `generate`, on top of a cache if there is one."""

    def __init__(self, name: str, model: Any, ids: Tensor, tokens: int, *, cache: Any = None, takes_part: bool = True):
        super().__init__(name)
        self._model, self._ids, self._tokens, self._cache, self._takes_part = model, ids, tokens, cache, takes_part
        self.ttits: list[float] = []
        self._ttft = 0.0

    def prepare(self) -> None:
        if self._cache is not None:
            self._cache.rewind()

    @torch.no_grad()
    def run(self) -> Any:
        if not self._takes_part:
            return None
        clock = StepClock()
        start = time.perf_counter()
        output = self.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            max_new_tokens=self._tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            logits_processor=LogitsProcessorList([clock]),
        )
        self._ttft = clock.times[0] - start
        self.ttits.append((clock.times[-1] - clock.times[0]) / (len(clock.times) - 1))
        # Copies of the cache are not kept until the next turn. The clock that counts, of steps, has stopped.
        self.prepare()
        return output

    def duration(self, elapsed: float) -> float:
        if not self._takes_part:
            return 0.0
        return self._ttft if self._cache is None else self.ttits[-1]

    def generate(self, ids: Tensor, **options: Any) -> Any:
        """The method's own `generate`."""
        return self._model.generate(ids, past_key_values=self._cache, **options)


class TensorParallelGeneration(Generation):
    """DeepSpeed's AutoTP, by the model inside its engine: the engine's own `generate` refuses long prompts."""

    def counting(self) -> AbstractContextManager[Bytes]:
        return counting_sums()

    def generate(self, ids: Tensor, **options: Any) -> Any:
        with shared_memory_sums(self.name == "tp"):
            return self._model.module.generate(ids, **options)


class ContextParallelGeneration(Generation):
    """A MegaKV engine."""

    def prepare(self) -> None:
        if self._cache is not None:
            self._cache.cut_back(self._ids.shape[1] - 1)

    @contextlib.contextmanager
    def counting(self) -> Iterator[Bytes]:
        sent: Bytes = {}
        yield sent
        # `generate` began a new count.
        sent.update(self._model.report().ranks[self._model.mesh.rank].bytes_sent)

    def generate(self, ids: Tensor, **options: Any) -> Any:
        if self._cache is None:
            return self._model.generate(ids, **options)
        return self._model.generate_into(self._cache, ids, **options)


def without_stop(model: PreTrainedModel) -> PreTrainedModel:
    """Let `generate` go on whatever the tokens: with random weights any may come."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
