"""Ways to prefill: plain transformers, DeepSpeed's tensor parallelism, MegaKV's context parallelism."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import deepspeed.comm
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import PreTrainedModel

import megakv
from megakv.compat import shared_memory_available

from .models import twin
from .sampling import Bytes, Method
from .world import World

TENSOR_PARALLEL = ("tp", "tp_gloo")


class Prefill(Method):
    """A forward pass over a whole prompt that fills the KV cache and yields the last token's logits.

    Parameters
    ----------
    name : str
    model : callable
        Takes what a transformers causal language model takes.
    ids : Tensor
        ``[1, S]`` the prompt.
    """

    def __init__(self, name: str, model: Any, ids: Tensor):
        super().__init__(name)
        self.model = model
        self._ids = ids

    @torch.no_grad()
    def run(self) -> Any:
        return self.model(input_ids=self._ids, use_cache=True, logits_to_keep=1)

    def close(self) -> None:
        """Give back what the engine holds."""


class TensorParallelPrefill(Prefill):
    """DeepSpeed's AutoTP engine.

    Parameters
    ----------
    shared_memory : bool
        Whether its sums over ranks may use its shared-memory op, as shipped, or must go through the process group.
    """

    def __init__(self, name: str, model: Any, ids: Tensor, *, shared_memory: bool):
        super().__init__(name, model, ids)
        self._shared_memory = shared_memory

    def run(self) -> Any:
        backend = deepspeed.comm.comm.cdb
        level = getattr(backend, "shm_vector_kernel_level", 0)
        try:
            # DeepSpeed asks for this level before every sum; 0 means that there is no such op.
            backend.shm_vector_kernel_level = level if self._shared_memory else 0
            return super().run()
        finally:
            backend.shm_vector_kernel_level = level

    @contextlib.contextmanager
    def counting(self) -> Iterator[Bytes]:
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

    def close(self) -> None:
        self.model.destroy()

    def _totals(self) -> Bytes:
        return self.model.report().ranks[self.model.mesh.rank].bytes_sent


def make_prefills(names: Sequence[str], model: PreTrainedModel, ids: Tensor, world: World) -> list[Prefill]:
    """The methods asked for, over one set of weights. Every rank must call it.

    Parameters
    ----------
    names : sequence of str
        ``single``, ``tp``, ``tp_gloo``, or a prefill method of MegaKV.
    model : PreTrainedModel
        Plain transformers, whole on every rank.
    ids : Tensor
        ``[1, S]`` the prompt.
    world : World
    """
    sharded = _tensor_parallel(model, world) if set(names).intersection(TENSOR_PARALLEL) else None
    methods: list[Prefill] = []
    for name in names:
        if name == "single":
            methods.append(Prefill(name, model, ids))
        elif name in TENSOR_PARALLEL:
            methods.append(TensorParallelPrefill(name, sharded, ids, shared_memory=name == "tp"))
        else:
            parallel = {"context_parallel": {"size": world.size, "prefill": name}}
            methods.append(ContextParallelPrefill(name, megakv.init_inference(twin(model), {"megakv": parallel}), ids))
    return methods


def cache_bytes(cache: Any) -> int:
    """Bytes of keys and values that a cache holds on this rank."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes())
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def uses_shared_memory(name: str) -> bool:
    """Whether a method's sums over ranks go through DeepSpeed's shared-memory op."""
    return name == "tp" and get_accelerator().device_name() == "cpu" and shared_memory_available()


def _tensor_parallel(model: PreTrainedModel, world: World) -> deepspeed.InferenceEngine:
    # It prints what it found to be row-parallel, from every rank.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return deepspeed.init_inference(twin(model), dtype=model.dtype, tensor_parallel={"tp_size": world.size})
