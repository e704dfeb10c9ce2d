"""Weights on their way: a decoder layer's weights are brought while the layers before it compute, in two buffers."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from megakv.base.errors import MegaKVError
from megakv.costmodel.memory import WEIGHT_BUFFERS
from megakv.offload.link import Link, Move, Transfer
from megakv.offload.weights import ALIGNMENT, LayerPlaces, LayerWeights
from megakv.weights.placement.plan import decoder_layers


@dataclass
class _BufferedLayer:
    """A layer that comes through a buffer, and the transfers of its pieces that were begun, in order."""

    layer: int
    buffer: int
    transfers: list[Transfer] = field(default_factory=list)


def _cuts(places: LayerPlaces, groups: int) -> list[int]:
    """Rows at which a layer's pieces begin and end: W_K and W_V alone (Figure 5b), then the others.

    Row-by-row these are the rest of attention, and all else; column-by-column, one piece for each group of sequences
    (Algorithm 1).
    """
    if groups == 1:
        cuts = [0, places.keys_rows, places.attention_rows, places.rows]
    else:
        rest = places.rows - places.keys_rows
        cuts = [0, *(places.keys_rows + rest * group // groups for group in range(groups + 1))]
    return sorted(set(cuts))


class WeightStream:
    """Brings the weights of a model's decoder layers, and has each wait that is not there when its module is called.

    A layer passes through one of two buffers. What keys and values are computed with may be overwritten as soon as the
    layer has attended, all else when it has ended; only then does the layer after the next come into its place.
    `LayerWeights.withdraw` left the parameters without memory; `groups` of sequences share a layer's weights
    (``num_gpu_batches``). Where pieces are `spread` they are asked for one by one, by `next_piece`; what is left when a
    layer begins then comes at once. `waited` are moments between which modules waited for their weights.
    """

    def __init__(self, model: PreTrainedModel, weights: LayerWeights, *, link: Link, device: torch.device, groups: int):
        self.spread = False
        self.waited: list[tuple[Any, Any]] = []
        self._weights, self._link, self._device = weights, link, device
        rows = max(places.rows for places in weights.layers)
        self._buffers = [torch.empty(rows, ALIGNMENT, dtype=torch.uint8, device=device) for _ in range(WEIGHT_BUFFERS)]
        self._groups = groups
        self._cuts = [_cuts(places, groups) for places in weights.layers]
        self._parameters = [
            [(model.get_parameter(place.name), place) for place in places.places] for places in weights.layers
        ]
        self._queue: deque[_BufferedLayer] = deque()
        self._active: _BufferedLayer | None = None
        self._handles: list[Any] = []
        for index, layer in enumerate(decoder_layers(model)[1]):
            self._watch(index, layer)
        self._restart(0)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers on the accelerator."""
        return sum(buffer.numel() for buffer in self._buffers)

    @property
    def on_disk(self) -> bool:
        """Whether the weights are read from a file."""
        return self._weights.disk is not None

    @property
    def step_bytes(self) -> int:
        """Bytes that every pass brings: all layers, once."""
        return self._weights.nbytes

    @property
    def layer_bytes(self) -> tuple[float, float]:
        """Bytes of a layer, on average: what keys and values are computed with, and all else."""
        layers = self._weights.layers
        keys = sum(places.keys_rows for places in layers) * ALIGNMENT / len(layers)
        return keys, self._weights.nbytes / len(layers) - keys

    def share(self, groups: int) -> None:
        """From the next layer on so many groups share a layer's weights."""
        if groups != self._groups:
            self._settle()
            self._groups, self._cuts = groups, [_cuts(places, groups) for places in self._weights.layers]
            self._restart(0)

    def attended(self) -> None:
        """The layer at work has attended: the weights for keys and values of the layer after the next may come."""
        if self._active is not None:
            following = self._queue[-1]
            fits = self._cuts[following.layer][1] <= self._weights.layers[self._active.layer].keys_rows
            if fits and not following.transfers:
                self._start_piece(following)

    def next_piece(self) -> None:
        """Where pieces are spread: begin to bring one more, of the first layer that may come and lacks any."""
        for coming in self._open()[: self.spread]:
            self._start_piece(coming)

    def close(self) -> None:
        """End all transfers, take the hooks off, and leave the weights in the host's memory."""
        for handle in self._handles:
            handle.remove()
        self._settle()
        for parameter, place in (pair for pairs in self._parameters for pair in pairs):
            parameter.data = self._weights.read(place.name).clone()
        self._weights.close()

    # Hooks

    def _watch(self, index: int, layer: nn.Module) -> None:
        self._handles.append(layer.register_forward_pre_hook(lambda *_: self._begin(index)))
        self._handles.append(layer.register_forward_hook(lambda *_: self._end(index)))
        stops = {id(parameter): place.stop for parameter, place in self._parameters[index]}
        for module in layer.modules():
            own = [stops[id(parameter)] for parameter in module.parameters(recurse=False) if id(parameter) in stops]
            if own:
                self._handles.append(module.register_forward_pre_hook(partial(self._await_byte, index, max(own))))

    def _begin(self, layer: int) -> None:
        if self._active is not None or self._queue[0].layer != layer:
            # The first pass, or one after a pass that broke off.
            self._restart(layer)
        active = self._active = self._queue.popleft()
        self._queue.append(_BufferedLayer((layer + WEIGHT_BUFFERS) % len(self._parameters), active.buffer))
        self._start_all(active)
        for parameter, place in self._parameters[layer]:
            parameter.data = place.within(self._buffers[active.buffer])

    def _await_byte(self, layer: int, last: int, *_: Any) -> None:
        """Wait for the pieces up to the one with the last byte of a module."""
        self._await(layer, next(n for n, row in enumerate(self._cuts[layer]) if row * ALIGNMENT >= last))

    def _await(self, layer: int, pieces: int, *_: Any) -> None:
        if self._active is None or self._active.layer != layer:
            return
        begun = self._link.clock.mark()
        for transfer in self._active.transfers[:pieces]:
            transfer.wait()
        self.waited.append((begun, self._link.clock.mark()))

    def _end(self, layer: int) -> None:
        active = self._active
        if active is None or active.layer != layer:
            return
        for transfer in active.transfers:
            # A layer may leave a module out (an expert): its memory is about to be written to again.
            transfer.wait()
        self._leave()
        if not self.spread:
            self._start_all(*self._open())

    # Inside

    def _restart(self, layer: int) -> None:
        """Forget what is on its way, and begin with a layer and the next."""
        self._settle()
        count = len(self._parameters)
        self._queue.extend(_BufferedLayer((layer + ahead) % count, ahead) for ahead in range(WEIGHT_BUFFERS))
        self._start_all(*self._open())

    def _settle(self) -> None:
        for each in (*self._queue, *([] if self._active is None else [self._active])):
            for transfer in each.transfers:
                # What a disk did not give is known to whoever waited for it.
                with suppress(MegaKVError):
                    transfer.settle()
        self._leave()
        self._queue.clear()

    def _leave(self) -> None:
        """No parameter refers to a buffer any more."""
        for parameter, place in () if self._active is None else self._parameters[self._active.layer]:
            parameter.data = place.without_memory(self._device)
        self._active = None

    def _lacks(self, coming: _BufferedLayer) -> bool:
        return len(coming.transfers) < len(self._cuts[coming.layer]) - 1

    def _open(self) -> list[_BufferedLayer]:
        """What may be brought whole, and is not yet: the last one follows the active one in its buffer."""
        free = WEIGHT_BUFFERS - (self._active is not None)
        return [coming for coming in list(self._queue)[:free] if self._lacks(coming)]

    def _start_all(self, *layers: _BufferedLayer) -> None:
        for coming in layers:
            while self._lacks(coming):
                self._start_piece(coming)

    def _start_piece(self, coming: _BufferedLayer) -> None:
        first, last = self._cuts[coming.layer][len(coming.transfers) : len(coming.transfers) + 2]
        host = self._weights.rows(coming.layer, first, last)
        device = self._buffers[coming.buffer][first:last]
        coming.transfers.append(self._link.start("in", [Move.of(host, device)]))
