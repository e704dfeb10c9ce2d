"""Ways to run a model: plain transformers, DeepSpeed's tensor parallelism, MegaKV; and what is measured of each."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import deepspeed
import deepspeed.comm
import torch
from torch import Tensor
from transformers import PreTrainedModel

import megakv
from megakv.base.errors import MegaKVError
from megakv.distributed.compat import shared_memory_available

from .models import twin, weight_bytes
from .sampling import Bytes, Method
from .timing import clocked
from .world import World

TENSOR_PARALLEL = ("tp", "tp_gloo")
LEVEL = "shm_vector_kernel_level"


class Peer:
    """A model as one library runs it: here plain transformers."""

    def __init__(self, model: Any):
        self.model = self.module = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def generate(self, ids: Tensor, cache: Any, **options: Any) -> Any:
        """The library's own `generate`, on top of a cache if there is one."""
        return self.model.generate(ids, past_key_values=cache, **options)

    def counting(self) -> AbstractContextManager[Bytes]:
        """Around a run: filled at its end with the bytes that this rank sent, by operation. May slow the run down."""
        return nullcontext({})

    def facts(self) -> dict[str, Any]:
        """Facts about every run."""
        return {"shared_memory": False}


class TensorParallel(Peer):
    """DeepSpeed's AutoTP engine; its sums over ranks may go through its shared-memory op."""

    def __init__(self, engine: deepspeed.InferenceEngine, *, shared_memory: bool):
        super().__init__(engine)
        self.module, self._shared_memory = engine.module, shared_memory

    def forward(self, **inputs: Any) -> Any:
        with shared_memory_sums(self._shared_memory):
            return self.model(**inputs)

    def generate(self, ids: Tensor, cache: Any, **options: Any) -> Any:
        # The engine's own `generate` refuses long prompts.
        with shared_memory_sums(self._shared_memory):
            return self.module.generate(ids, **options)

    def counting(self) -> AbstractContextManager[Bytes]:
        return counting_sums()

    def facts(self) -> dict[str, Any]:
        needed = 1 if self.module.dtype == torch.float32 else 2
        level = getattr(deepspeed.comm.comm.cdb, LEVEL, 0)
        return {"shared_memory": self._shared_memory and shared_memory_available() and level >= needed}


class ContextParallel(Peer):
    """A MegaKV engine."""

    def __init__(self, engine: megakv.MegaKVEngine):
        super().__init__(engine)
        self.module = engine.module

    def generate(self, ids: Tensor, cache: Any, **options: Any) -> Any:
        if cache is None:
            return self.model.generate(ids, **options)
        return self.model.generate_into(cache, ids, **options)

    @contextlib.contextmanager
    def counting(self) -> Iterator[Bytes]:
        # A `generate` begins a new count, a pass does not.
        self.model._comm.ledger.reset()
        sent: Bytes = {}
        yield sent
        sent.update(self.model.report().ranks[self.model.mesh.rank].bytes_sent)


class Prefill(Method):
    """A forward pass over a prompt, or a turn of a conversation, that fills the KV cache; the last token's logits."""

    def __init__(self, name: str, peer: Peer, ids: Tensor, *prepare: Callable[[], object], **inputs: Any):
        super().__init__(name, *prepare)
        self.peer = peer
        self._inputs = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1, **inputs}

    @torch.no_grad()
    def run(self) -> Any:
        return self.peer.forward(**self._inputs)

    def counting(self) -> AbstractContextManager[Bytes]:
        return self.peer.counting()

    def result(self, output: Any) -> Tensor:
        logits: Tensor = output.logits[0, -1]
        return logits

    def facts(self, world: World, output: Any) -> dict[str, Any]:
        cache: Any = output.past_key_values
        own = hasattr(cache, "nbytes")
        held = cache.nbytes() if own else sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return {"kv_bytes": world.gather(int(held)), **self.peer.facts()}


class Generation(Method):
    """Greedy generation of a fixed number of tokens, on top of a cache if there is one; a step's time, or the TTFT."""

    def __init__(
        self,
        name: str,
        peer: Peer,
        ids: Tensor,
        tokens: int,
        *prepare: Callable[[], object],
        cache: Any = None,
        takes_part: bool = True,
    ):
        super().__init__(name, *prepare)
        self.peer = peer
        self._ids, self._tokens, self._cache, self._takes_part = ids, tokens, cache, takes_part
        self.ttits: list[float] = []
        self._ttft = 0.0

    @torch.no_grad()
    def run(self) -> Any:
        if not self._takes_part:
            return None
        generate = partial(self.peer.generate, cache=self._cache)
        output, clock = clocked(generate, self._ids, self._tokens, return_dict_in_generate=True, output_logits=True)
        self._ttft = clock.prompt_s
        self.ttits.append((clock.times[-1] - clock.times[0]) / (len(clock.times) - 1))
        # Copies of the cache are not kept until the next turn. The clock that counts, of steps, has stopped.
        self.prepare()
        return output

    def duration(self, elapsed: float) -> float:
        if not self._takes_part:
            return 0.0
        return self._ttft if self._cache is None else self.ttits[-1]

    def counting(self) -> AbstractContextManager[Bytes]:
        return self.peer.counting()

    def result(self, output: Any) -> Tensor | None:
        return None if output is None else output.logits[0]

    def facts(self, world: World, output: Any) -> dict[str, Any]:
        return {"weight_bytes": world.gather(weight_bytes(self.peer.module)), **self.peer.facts()}


class Peers:
    """The libraries over one set of weights. Engines are made when first asked for, kept, and destroyed at the end.

    Every rank must make the same calls.
    """

    def __init__(self, model: PreTrainedModel, world: World):
        self.model = model
        self._world = world
        self._sharded: deepspeed.InferenceEngine | None = None
        self._engines: dict[str, megakv.MegaKVEngine] = {}

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *ending: object) -> None:
        for name in list(self._engines):
            self.drop(name)

    def tensor_parallel(self, name: str) -> TensorParallel:
        """DeepSpeed's AutoTP over all ranks, as ``tp`` or ``tp_gloo``."""
        if name == "tp_gloo" and shared_memory_available() and not hasattr(deepspeed.comm.comm.cdb, LEVEL):
            raise MegaKVError("--methods tp_gloo: this DeepSpeed always uses its shared-memory op; leave tp_gloo out")
        if self._sharded is None:
            size = {"tp_size": self._world.size}
            # It prints what it found to be row-parallel, from every rank.
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                self._sharded = deepspeed.init_inference(twin(self.model), dtype=self.model.dtype, tensor_parallel=size)
        return TensorParallel(self._sharded, shared_memory=name == "tp")

    def engine(
        self, name: str, parallel: Mapping[str, Any], *, tp_size: int = 1, **section: Any
    ) -> megakv.MegaKVEngine:
        """The MegaKV engine of that name, made with these sections if it is new."""
        if name not in self._engines:
            parallel = {"size": self._world.size // tp_size, **parallel}
            config = {"tensor_parallel": {"tp_size": tp_size}, "megakv": {"context_parallel": parallel, **section}}
            self._engines[name] = megakv.init_inference(twin(self.model), config)
        return self._engines[name]

    def drop(self, name: str) -> None:
        """Let go of an engine, if there is one of that name."""
        if name in self._engines:
            self._engines.pop(name).destroy()

    def prefill(self, name: str, ids: Tensor, *prepare: Callable[[], object]) -> Prefill:
        """A whole prompt by plain transformers (``single``), by AutoTP, or by a method of MegaKV's."""
        if name == "single":
            peer = Peer(self.model)
        elif name in TENSOR_PARALLEL:
            peer = self.tensor_parallel(name)
        else:
            peer = ContextParallel(self.engine(name, {"prefill": name}))
        return Prefill(name, peer, ids, *prepare)


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
