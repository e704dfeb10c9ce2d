"""Ways to prefill: plain transformers, DeepSpeed's tensor parallelism, MegaKV's rings and its chain."""

from __future__ import annotations

import contextlib
import math
import os
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

    def __init__(self, name: str, model: Any, ids: Tensor):
        super().__init__(name)
        self.model = model
        self._ids = ids

    @torch.no_grad()
    def run(self) -> Any:
        return self.model(input_ids=self._ids, use_cache=True, logits_to_keep=1)


class MaskedPrefill(Prefill):
    """Plain transformers that computes all scores and hides half under a mask, as if it knew of no causality."""

    def __init__(self, name: str, model: Any, ids: Tensor):
        super().__init__(name, model, ids)
        square = torch.full((1, 1, ids.shape[1], ids.shape[1]), -torch.inf, dtype=model.dtype, device=ids.device)
        self._mask = square.triu_(1)

    @torch.no_grad()
    def run(self) -> Any:
        return self.model(input_ids=self._ids, attention_mask=self._mask, use_cache=True, logits_to_keep=1)


class TensorParallelPrefill(Prefill):
    """DeepSpeed's AutoTP engine."""

    def __init__(self, name: str, model: Any, ids: Tensor, *, shared_memory: bool):
        super().__init__(name, model, ids)
        self._shared_memory = shared_memory

    def run(self) -> Any:
        with shared_memory_sums(self._shared_memory):
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
        for operation, total in self._totals().items():
            if total > before.get(operation, 0):
                sent[operation] = total - before.get(operation, 0)

    def _totals(self) -> Bytes:
        return self.model.report().ranks[self.model.mesh.rank].bytes_sent


class Turn(ContextParallelPrefill):
    """A turn of a conversation: new tokens on top of those that a cache, which methods may share, holds now."""

    def __init__(self, name: str, engine: megakv.MegaKVEngine, ids: Tensor, cache: ShardedCache):
        super().__init__(name, engine, ids)
        self._cache = cache
        self._held = cache.length

    def prepare(self) -> None:
        self._cache.cut_back(self._held)

    @torch.no_grad()
    def run(self) -> Any:
        return self.model(input_ids=self._ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)


class ChainPrefill(ContextParallelPrefill):
    """An engine's chain with one partition. Several may share the engine."""

    def __init__(self, name: str, engine: megakv.MegaKVEngine, ids: Tensor, partition: Partition):
        super().__init__(name, engine, ids)
        self.partition = partition

    def prepare(self) -> None:
        self.model.partitions.use(self.partition)


class SilentLink(ChainLink):
    """A place in the chain where nothing is sent, and what would be received is there at once: random numbers.

    Tokens are the real ones, so every rank computes what it would compute. Messages of the same sizes are made once.
    """

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
        if name not in TENSOR_PARALLEL:
            return ContextParallelPrefill(name, self.engine(name, {"context_parallel": {"prefill": name}}), ids)
        if name == "tp_gloo" and shared_memory_available() and not hasattr(deepspeed.comm.comm.cdb, LEVEL):
            raise MegaKVError("--methods tp_gloo: this DeepSpeed always uses its shared-memory op; leave tp_gloo out")
        self._sharded = self._sharded or tensor_parallel(self.model, self._world)
        return TensorParallelPrefill(name, self._sharded, ids, shared_memory=name == "tp")

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
        """Let go of all engines."""
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
    return name == "tp" and shared_memory_available() and _kernel_level() >= needed


def _kernel_level() -> int:
    """What DeepSpeed asks for before every sum, for vector instructions; 0 means that its op is not used."""
    return int(getattr(deepspeed.comm.comm.cdb, LEVEL, 0))


@contextlib.contextmanager
def shared_memory_sums(allowed: bool) -> Iterator[None]:
    """For a while, DeepSpeed's sums over ranks may use its shared-memory op, or must go through the process group."""
    backend, level = deepspeed.comm.comm.cdb, _kernel_level()
    if allowed:
        yield
        return
    setattr(backend, LEVEL, 0)
    try:
        yield
    finally:
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
