"""Greedy generation by every method, through the `generate` that its users call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import megakv

from .caches import CopyingCache, RoomyCache
from .prefills import counting_sums, shared_memory_sums
from .sampling import Bytes, Method


class StepClock(LogitsProcessor):
    """Notes when the logits of each step are there: transformers calls it before it chooses a token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        get_accelerator().synchronize()
        self.times.append(time.perf_counter())
        return scores


class Generation(Method):
    """Generate a fixed number of tokens."""

    def __init__(self, name: str, ids: Tensor, tokens: int, *, cached: bool = False):
        super().__init__(name)
        self._ids = ids
        self._tokens = tokens
        self._cached = cached
        self.ttits: list[float] = []
        self._ttft = 0.0

    @torch.no_grad()
    def run(self) -> Any:
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
        return output

    def duration(self, elapsed: float) -> float:
        return self.ttits[-1] if self._cached else self._ttft

    def generate(self, ids: Tensor, **options: Any) -> Any:
        """The method's own `generate`."""
        raise NotImplementedError


class PlainGeneration(Generation):
    """Plain transformers, in one process."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        ids: Tensor,
        tokens: int,
        *,
        cache: RoomyCache | CopyingCache | None = None,
        takes_part: bool = True,
    ):
        super().__init__(name, ids, tokens, cached=cache is not None)
        self._model = model
        self._cache = cache
        self._takes_part = takes_part

    def prepare(self) -> None:
        if self._cache is not None:
            self._cache.rewind()

    def run(self) -> Any:
        if not self._takes_part:
            return None
        output = super().run()
        # Copies of the cache are not kept until the next turn. The clock that counts, of steps, has stopped.
        self.prepare()
        return output

    def duration(self, elapsed: float) -> float:
        return super().duration(elapsed) if self._takes_part else 0.0

    def generate(self, ids: Tensor, **options: Any) -> Any:
        return self._model.generate(ids, past_key_values=self._cache, **options)


class TensorParallelGeneration(Generation):
    """DeepSpeed's AutoTP, by the model inside its engine: the engine's own `generate` refuses long prompts."""

    def __init__(self, name: str, engine: deepspeed.InferenceEngine, ids: Tensor, tokens: int, *, shared_memory: bool):
        super().__init__(name, ids, tokens)
        self._engine = engine
        self._shared_memory = shared_memory

    def counting(self) -> AbstractContextManager[Bytes]:
        return counting_sums()

    def generate(self, ids: Tensor, **options: Any) -> Any:
        with shared_memory_sums(self._shared_memory):
            return self._engine.module.generate(ids, **options)


class ContextParallelGeneration(Generation):
    """A MegaKV engine."""

    def __init__(self, name: str, engine: megakv.MegaKVEngine, ids: Tensor, tokens: int, *, cache: Any = None):
        super().__init__(name, ids, tokens, cached=cache is not None)
        self._engine = engine
        self._cache = cache

    def prepare(self) -> None:
        if self._cache is not None:
            self._cache.cut_back(self._ids.shape[1] - 1)

    @contextlib.contextmanager
    def counting(self) -> Iterator[Bytes]:
        sent: Bytes = {}
        yield sent
        # `generate` began a new count.
        sent.update(self._engine.report().ranks[self._engine.mesh.rank].bytes_sent)

    def generate(self, ids: Tensor, **options: Any) -> Any:
        if self._cache is None:
            return self._engine.generate(ids, **options)
        return self._engine.generate_into(self._cache, ids, **options)


def without_stop(model: PreTrainedModel) -> PreTrainedModel:
    """Let `generate` go on whatever the tokens: with random weights any may come."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
