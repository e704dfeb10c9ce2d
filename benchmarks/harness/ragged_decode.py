"""Decode attention of all layers on real ranks, each layer ending in the all-reduce that ends it in a model."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from megakv.distributed.comm import Communicator

from .head_division import Division
from .ragged_heads import RankLayer, TokenPool
from .room import Room
from .sampling import Method


class RaggedDecode(Method):
    """A decode step's attention, several times.

    The partial results of a head whose tokens are on several ranks are merged by log-sum-exp: ranks learn each other's,
    and add their outputs up in the all-reduce that is there anyway.
    """

    def __init__(self, division: Division, pool: TokenPool, comm: Communicator, room: Room, *, batch: int, steps: int):
        super().__init__(division.name)
        self._division, self._pool, self._comm, self._room = division, pool, comm, room
        self._steps = steps
        self._shape = pool.shape
        self._batch = batch
        self._layers: list[RankLayer] = []
        self._divided = [bool(division.divided(layer)) for layer in range(len(division.budgets))]
        self.busy: list[float] = []
        self.layer_seconds: list[list[float]] = []
        self._computed: list[float] = []

    def prepare(self) -> None:
        """Have the cache in memory."""
        self._room.take(self)

    def build(self) -> None:
        """Fill the cache of all layers."""
        rank, division = self._comm.mesh.tp_rank, self._division
        self._layers = [
            RankLayer(self._pool, division, layer, rank, self._batch) for layer in range(len(division.budgets))
        ]

    def leave(self) -> None:
        """Free the cache."""
        self._layers.clear()

    @torch.inference_mode()
    def run(self) -> Tensor:
        """``[layers, B, K, G, D]`` outputs of the last step."""
        self._computed = [0.0] * len(self._layers)
        start = time.perf_counter()
        for _ in range(self._steps):
            outputs = [self._layer(number) for number in range(len(self._layers))]
        self.busy.append(sum(self._computed) / (time.perf_counter() - start))
        self.layer_seconds.append([seconds / self._steps for seconds in self._computed])
        return torch.stack(outputs)

    def duration(self, elapsed: float) -> float:
        return elapsed / self._steps

    def _layer(self, number: int) -> Tensor:
        shape, layer = self._shape, self._layers[number]
        start = time.perf_counter()
        out, lse = layer.attend()
        whole = out.new_zeros(self._batch * shape.kv_heads, shape.group, shape.dim)
        self._computed[number] += time.perf_counter() - start
        if self._divided[number]:
            layer.weigh(out, lse, self._comm.tp_all_reduce)
        whole[layer.index] = out
        return self._comm.tp_all_reduce(whole).view(self._batch, shape.kv_heads, shape.group, shape.dim)
