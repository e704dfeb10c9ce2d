"""Ways to prefill: plain transformers, DeepSpeed's tensor parallelism, MegaKV's rings and its chain."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
import deepspeed.comm
import torch
from torch import Tensor
from transformers import PreTrainedModel

import megakv
from megakv.attention.chain import ChainLink, ChainPlan
from megakv.attention.method import AttentionCall, PackedAttention
from megakv.attention.ring import KVFormat
from megakv.attention.runahead import Runahead
from megakv.cache.cache import ShardedCache
from megakv.compat import shared_memory_available
from megakv.errors import MegaKVError
from megakv.runahead.partition import Partition

from .models import twin
from .sampling import Bytes, Method
from .world import World

TENSOR_PARALLEL = ("tp", "tp_gloo")
LEVEL = "shm_vector_kernel_level"


class Prefill(Method):
    """A forward pass over a whole prompt that fills the KV cache and yields the last token's logits."""

    def __init__(self, name: str, model: Any, ids: Tensor, **inputs: Any):
        super().__init__(name)
        self.model = model
        self._inputs = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1, **inputs}

    @torch.no_grad()
    def run(self) -> Any:
        return self.model(**self._inputs)


class TensorParallelPrefill(Prefill):
    """DeepSpeed's AutoTP engine; by its shared-memory op if the name is ``tp``."""

    def run(self) -> Any:
        with shared_memory_sums(self.name == "tp"):
            return super().run()

    def counting(self) -> AbstractContextManager[Bytes]:
        return counting_sums()


class ContextParallelPrefill(Prefill):
    """A MegaKV engine with one prefill method."""

    model: megakv.MegaKVEngine

    @contextlib.contextmanager
    def counting(self) -> Iterator[Bytes]:
        before = self._totals()
        sent: Bytes = {}
        yield sent
        sent.update(self._totals() - before)

    def _totals(self) -> Counter[str]:
        return Counter(self.model.report().ranks[self.model.mesh.rank].bytes_sent)


class Turn(ContextParallelPrefill):
    """A turn of a conversation: new tokens on top of those that a cache, which methods may share, holds now."""

    def __init__(self, name: str, engine: megakv.MegaKVEngine, ids: Tensor, cache: ShardedCache):
        super().__init__(name, engine, ids, past_key_values=cache)
        self._cache, self._held = cache, cache.length

    def prepare(self) -> None:
        self._cache.cut_back(self._held)


class ChainPrefill(ContextParallelPrefill):
    """An engine's chain with one partition. Several may share the engine."""

    def __init__(self, name: str, engine: megakv.MegaKVEngine, ids: Tensor, partition: Partition):
        super().__init__(name, engine, ids)
        self.partition = partition

    def prepare(self) -> None:
        self.model.partitions.use(self.partition)


class SilentLink(ChainLink):
    """A place in the chain where nothing is sent, and random numbers stand for what would be received."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: dict[tuple[int, int], Tensor] = {}

    def start_pass(self, plan: ChainPlan) -> None:
        pass

    def start_layer(self, call: AttentionCall, sizes: Sequence[int], following: Sequence[tuple[int, int]]) -> None:
        pass

    def send_own(self, call: AttentionCall, plan: ChainPlan, messages: KVFormat) -> None:
        pass

    def arrivals(self, call: AttentionCall, plan: ChainPlan, messages: KVFormat) -> Iterator[tuple[int, Tensor]]:
        for index in plan.incoming:
            key = index, messages.nbytes(index)
            if key not in self._messages:
                numbers = torch.randn(key[1] // call.q_HLD.element_size())
                self._messages[key] = numbers.to(call.q_HLD).view(torch.uint8)
            yield index, self._messages[key]


class SilentQueries:
    """The visits of the last layer's queries without their ways: every rank attends for random ones at once."""

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        heads, _, dim = call.q_HLD.shape
        found: dict[int, tuple[Tensor, Tensor]] = {}
        with call.comm.ledger.compute("attention", call.layer):
            for rank, tokens in enumerate(call.queries):
                own = rank == call.rank
                queries = call.q_HLD if own else torch.randn(heads, len(tokens), dim).to(call.q_HLD)
                attention = PackedAttention(queries, tokens, call.scoring, call.value_dim)
                for part in call.local_parts():
                    attention.add(part)
                found[rank] = attention.result()
        return found[call.rank]


def silence(engine: megakv.MegaKVEngine) -> None:
    """Let an engine's chain send nothing from now on: what it computes is worth nothing but its time."""
    method = engine._runtime.methods["runahead"]
    assert isinstance(method, Runahead)
    method._link = SilentLink()
    engine._runtime.methods["pass_q"] = SilentQueries()


class Prefills:
    """Makes methods over one set of weights. Engines are made when first asked for, and kept."""

    def __init__(self, model: PreTrainedModel, world: World):
        self.model = model
        self._world = world
        self._sharded: deepspeed.InferenceEngine | None = None
        self._engines: dict[str, megakv.MegaKVEngine] = {}

    def make(self, name: str, ids: Tensor) -> Prefill:
        """One method. Every rank must call it."""
        if name == "single":
            return Prefill(name, self.model, ids)
        if name == "single_masked":
            # All scores are computed, and half of them hidden, as if it knew of no causality.
            square = torch.full((1, 1, ids.shape[1], ids.shape[1]), -torch.inf, dtype=self.model.dtype)
            return Prefill(name, self.model, ids, attention_mask=square.triu_(1).to(ids.device))
        if name not in TENSOR_PARALLEL:
            return ContextParallelPrefill(name, self.engine(name, {"context_parallel": {"prefill": name}}), ids)
        if name == "tp_gloo" and shared_memory_available() and not hasattr(deepspeed.comm.comm.cdb, LEVEL):
            raise MegaKVError("--methods tp_gloo: this DeepSpeed always uses its shared-memory op; leave tp_gloo out")
        self._sharded = self._sharded or tensor_parallel(self.model, self._world)
        return TensorParallelPrefill(name, self._sharded, ids)

    def engine(self, name: str, section: Mapping[str, Any]) -> megakv.MegaKVEngine:
        """The engine of that name, made with this section ``megakv`` if it is new. Every rank must call it."""
        if name not in self._engines:
            parallel = {**section.get("context_parallel", {}), "size": self._world.size}
            config = {"megakv": {**section, "context_parallel": parallel}}
            self._engines[name] = megakv.init_inference(twin(self.model), config)
        return self._engines[name]

    def drop(self, name: str) -> None:
        """Let go of an engine, if there is one of that name."""
        if name in self._engines:
            self._engines.pop(name).destroy()

    def close(self) -> None:
        for name in list(self._engines):
            self.drop(name)


def cache_bytes(cache: Any) -> int:
    """Bytes of keys and values that a cache holds on this rank."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes())
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def uses_shared_memory(name: str, dtype: torch.dtype) -> bool:
    """Whether a method's sums over ranks go through DeepSpeed's shared-memory op."""
    needed = 1 if dtype == torch.float32 else 2
    return name == "tp" and shared_memory_available() and getattr(deepspeed.comm.comm.cdb, LEVEL, 0) >= needed


@contextlib.contextmanager
def shared_memory_sums(allowed: bool) -> Iterator[None]:
    """For a while, DeepSpeed's sums over ranks may use its shared-memory op, or must go through the process group."""
    backend = deepspeed.comm.comm.cdb
    # What DeepSpeed asks for before every sum, for vector instructions; 0 means that its op is not used.
    level = getattr(backend, LEVEL, 0)
    if not allowed:
        setattr(backend, LEVEL, 0)
    try:
        yield
    finally:
        if not allowed:
            setattr(backend, LEVEL, level)


@contextlib.contextmanager
def counting_sums() -> Iterator[Bytes]:
    """By DeepSpeed's own communication log; an all-reduce counts as what its ring form sends."""
    log = deepspeed.comm.comm.comms_logger
    deepspeed.comm.configure(enabled=True, prof_all=True, verbose=False)
    log.reset_data()
    sent: Bytes = {}
    try:
        yield sent
    finally:
        deepspeed.comm.configure(enabled=False)
    size = deepspeed.comm.get_world_size()
    for operation, messages in log.get_raw_data().items():
        nbytes = sum(length * counts[0] for length, counts in messages.items())
        sent[operation] = math.ceil(2 * nbytes * (size - 1) / size) if operation == "all_reduce" else nbytes


def tensor_parallel(model: PreTrainedModel, world: World) -> deepspeed.InferenceEngine:
    """DeepSpeed's AutoTP engine over all ranks, on the weights of `model`."""
    # It prints what it found to be row-parallel, from every rank.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return deepspeed.init_inference(twin(model), dtype=model.dtype, tensor_parallel={"tp_size": world.size})
