"""Emulation for `offload.py`: transformers' offloaded cache over a link, and a paced disk."""

from __future__ import annotations

import tempfile
import time
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from megakv.costmodel.shape import ModelShape
from megakv.offload.disk import DiskTier
from megakv.offload.link import EmulatedLink, Move, Transfer

from .plan import Case

PAGES, MOST_KIB = 8, 64
"""Pages of a sequence's keys and values in a layer, at least, and their size at most: what lies in memory is then close
to what is asked for."""
GRACE_S = 1e-3  # A read that follows another sooner than that makes good what the other overslept


class EmulatedOffloadedCache(DynamicCache):
    """Moves of transformers' ``DynamicCache(offloading=True)``, which needs CUDA, over an emulated link.

    A layer is brought while the one before computes, and copied back whole, in line with the computation.
    """

    def __init__(self, link: EmulatedLink, config: PreTrainedConfig):
        super().__init__(config=config)
        self.waited_s = 0.0
        self.most_bytes = 0
        self._link = link
        self._host: dict[int, tuple[Tensor, Tensor]] = {}
        self._coming: dict[int, Transfer] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._bring(layer_idx)
        begun = time.perf_counter()
        if layer_idx in self._coming:
            self._coming.pop(layer_idx).wait()
        self.waited_s += time.perf_counter() - begun
        following = layer_idx + 1 if layer_idx + 1 in self._host else 0
        if following != layer_idx:
            self._bring(following)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        held = [layer for layer in self.layers if layer.keys is not None]
        self.most_bytes = max(self.most_bytes, sum(layer.keys.nbytes + layer.values.nbytes for layer in held))
        layer: Any = self.layers[layer_idx]
        kept = layer.keys.contiguous(), layer.values.contiguous()
        self._host[layer_idx] = torch.empty_like(kept[0]), torch.empty_like(kept[1])
        begun = time.perf_counter()
        self._move("out", layer_idx, kept).settle()
        self.waited_s += time.perf_counter() - begun
        layer.keys = layer.values = torch.empty(0)
        return keys, values

    def _bring(self, index: int) -> None:
        if index in self._coming or index not in self._host:
            return
        layer: Any = self.layers[index]
        layer.keys, layer.values = (torch.empty_like(kept) for kept in self._host[index])
        self._coming[index] = self._move("in", index, (layer.keys, layer.values))

    def _move(self, way: Literal["in", "out"], index: int, pair: tuple[Tensor, Tensor]) -> Transfer:
        rows = [[each.view(-1, each.shape[-1]) for each in tensors] for tensors in (self._host[index], pair)]
        return self._link.start(way, [Move.of(host, device) for host, device in zip(*rows, strict=True)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if layer_idx < len(self.layers) and self.layers[layer_idx].is_sliding:
            return super().get_seq_length(layer_idx)
        return self._host[layer_idx][0].shape[-2] if layer_idx in self._host else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if self.layers[layer_idx].is_sliding:
            return super().get_mask_sizes(query_length, layer_idx)
        return self.get_seq_length(layer_idx) + query_length, 0


def budgets(case: Case, shape: ModelShape) -> dict[str, Any]:
    """Settings of ``megakv.offload`` that say where rows lie: the same host memory for every method."""
    assert case.in_memory is not None
    cache = case.cache_bytes(shape)
    page_kib = cache // (len(shape.layers) * case.batch * PAGES) >> 10
    return {
        "host_gb": case.in_memory * cache / (1 << 30),
        # All of it has room there, whatever the method, and what each sequence's last pages leave empty.
        "disk_gb": case.host_bytes(shape) / (1 << 30),
        "disk_path": tempfile.gettempdir(),
        "page_kib": min(MOST_KIB, 1 << max(0, page_kib.bit_length() - 1)),
    }


class PacedReads:
    """Reads of a disk tier that are no faster than a bandwidth, in place of its own `read`."""

    def __init__(self, disk: DiskTier, bytes_s: float):
        self._read, self._bytes_s = disk.read, bytes_s
        self._free = 0.0
        disk.read = self  # type: ignore[method-assign]

    def __call__(self, offset: int, memory: memoryview) -> None:
        begun = time.perf_counter()
        self._read(offset, memory)
        self._free = (self._free if begun - self._free < GRACE_S else begun) + len(memory) / self._bytes_s
        time.sleep(max(0.0, self._free - time.perf_counter()))
