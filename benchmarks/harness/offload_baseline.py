"""What transformers' own offloaded cache does, on an accelerator and over an emulated link."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from megakv.offload.emulated_link import EmulatedLink
from megakv.offload.link import Move, Transfer


class EmulatedOffloadedCache(DynamicCache):
    """What transformers' ``DynamicCache(offloading=True)`` moves, and when, over an emulated link.

    That cache needs CUDA streams. As there: a layer is brought while the one before computes, and copied back whole, in
    line with the computation, as soon as its new tokens are in it.
    """

    def __init__(self, link: EmulatedLink, config: PreTrainedConfig):
        super().__init__(config=config)
        self.waited_s = 0.0
        self.most_bytes = 0
        self._link = link
        self._host: dict[int, tuple[Tensor, Tensor]] = {}
        self._coming: dict[int, Transfer] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Keys and values of all tokens."""
        self._bring(layer_idx)
        begun = time.perf_counter()
        if layer_idx in self._coming:
            self._coming.pop(layer_idx).wait()
        self.waited_s += time.perf_counter() - begun
        self._bring(layer_idx + 1 if layer_idx + 1 in self._host else 0, besides=layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.most_bytes = max(self.most_bytes, sum(self._bytes(layer) for layer in self.layers))
        layer: Any = self.layers[layer_idx]
        kept = layer.keys.contiguous(), layer.values.contiguous()
        host = torch.empty_like(kept[0]), torch.empty_like(kept[1])
        begun = time.perf_counter()
        self._link.start("out", [self._move(there, own) for there, own in zip(host, kept, strict=True)]).settle()
        self.waited_s += time.perf_counter() - begun
        self._host[layer_idx] = host
        layer.keys = layer.values = torch.empty(0)
        return keys, values

    def _bring(self, index: int, *, besides: int = -1) -> None:
        layer: Any = self.layers[index] if index < len(self.layers) else None
        there = layer is None or index in self._coming or index not in self._host or index == besides
        if there or (layer.keys is not None and layer.keys.numel()):
            return
        host = self._host[index]
        layer.keys, layer.values = torch.empty_like(host[0]), torch.empty_like(host[1])
        pairs = zip(host, (layer.keys, layer.values), strict=True)
        self._coming[index] = self._link.start("in", [self._move(kept, target) for kept, target in pairs])

    @staticmethod
    def _bytes(layer: Any) -> int:
        return 0 if layer.keys is None else layer.keys.nbytes + layer.values.nbytes

    @staticmethod
    def _move(host: Tensor, device: Tensor) -> Move:
        return Move(host.view(-1, host.shape[-1]), device.view(-1, device.shape[-1]))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far, wherever they lie."""
        if layer_idx < len(self.layers) and self.layers[layer_idx].is_sliding:
            return super().get_seq_length(layer_idx)
        return self._host[layer_idx][0].shape[-2] if layer_idx in self._host else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask is for."""
        if self.layers[layer_idx].is_sliding:
            return super().get_mask_sizes(query_length, layer_idx)
        return self.get_seq_length(layer_idx) + query_length, 0
