"""Weights of decoder layers in host memory or on disk: where each lies, in the order in which a layer needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.base.errors import CombinationError, MegaKVError, in_units
from megakv.offload.config import OffloadConfig
from megakv.offload.disk import DiskTier, FileRows
from megakv.offload.host_memory import HostTier
from megakv.offload.link import Move
from megakv.weights.placement.plan import decoder_layers

ALIGNMENT = 64
"""Bytes that each weight's memory begins at a multiple of; transfers are cut into rows of that size."""
KEYS_AND_VALUES = frozenset(
    ("k_proj", "v_proj", "kv_proj", "kv_a_proj_with_mqa", "kv_b_proj", "key", "value", "Wk", "Wv")
    + ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
)
"""Parts of attention modules that keys and values are computed with, and that nobody needs once attention was called:
what comes next may overwrite them then. A name that is missing here only comes later than it might."""


@dataclass(frozen=True)
class Place:
    """Where a parameter of the model lies in its layer's memory, from which byte on."""

    name: str
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """The byte behind its last."""
        return self.offset + prod(self.shape) * self.dtype.itemsize

    def within(self, memory: Tensor) -> Tensor:
        """The weight in a layer's memory ``[n, ALIGNMENT]``: a view."""
        return memory.view(-1)[self.offset : self.stop].view(self.dtype).view(self.shape)

    def without_memory(self, device: torch.device) -> Tensor:
        """Its shape and type alone."""
        return torch.empty((), dtype=self.dtype, device=device).expand(self.shape)


@dataclass(frozen=True)
class LayerPlaces:
    """One decoder layer's weights, as they are sent: for keys and values, for the rest of attention, all others.

    With the end of each of these, in rows of `ALIGNMENT` bytes.
    """

    places: tuple[Place, ...]
    keys_rows: int
    attention_rows: int
    rows: int

    @property
    def nbytes(self) -> int:
        return self.rows * ALIGNMENT


def _turn(path: str, layer: nn.Module) -> int:
    """When a weight is needed: 0 for keys and values (Figure 5b: first), 1 for the rest of attention, 2 for others."""
    names = path.split(".")[:-1]
    owners = [layer.get_submodule(".".join(names[: depth + 1])) for depth in range(len(names))]
    attention = [depth for depth, owner in enumerate(owners) if "Attention" in type(owner).__name__]
    if not attention:
        return 2
    return 0 if KEYS_AND_VALUES & set(names[attention[0] + 1 :]) else 1


def layer_places(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> list[LayerPlaces]:
    """What of each decoder layer can lie in host memory.

    What several modules share stays on the accelerator, and so do norms, biases and sinks: they are small, and nothing
    has to wait for them. Parameters have local shapes, and the types given by name; they need no memory.
    """
    prefix, modules = decoder_layers(model)
    users = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    layers = []
    for index, layer in enumerate(modules):
        ends, places, rows = [0, 0, 0], [], 0
        own = dict(layer.named_parameters())
        for turn, path in sorted((_turn(path, layer), path) for path in own):
            if users[id(own[path])] == 1 and own[path].ndim > 1:
                name = f"{prefix}.{index}.{path}"
                places.append(Place(name, rows * ALIGNMENT, own[path].shape, dtypes[name]))
                ends[turn] = rows = -(-places[-1].stop // ALIGNMENT)
        layers.append(LayerPlaces(tuple(places), ends[0], max(ends[:2]), rows))
    return layers


class LayerWeights:
    """The weights of all decoder layers (see `layer_places`) off the accelerator, in a tier of their own.

    They lie in host memory, page-locked with `pin`, or in a file, by ``megakv.offload.weights``. `nbytes` are taken at
    start; refused where they do not fit the budget, or the machine, with the numbers.
    """

    def __init__(self, model: PreTrainedModel, dtypes: Mapping[str, torch.dtype], config: OffloadConfig, *, pin: bool):
        self.layers = layer_places(model, dtypes)
        self.nbytes = sum(layer.nbytes for layer in self.layers)
        self._starts = [0, *accumulate(layer.nbytes for layer in self.layers)]
        self._places = {
            place.name: (start, place)
            for start, layer in zip(self._starts, self.layers, strict=False)
            for place in layer.places
        }
        needed = f"{in_units(self.nbytes)} of {{}} for this rank's decoder layers"
        self.tier: HostTier | DiskTier
        if config.weights == "disk":
            if self.nbytes > config.disk_bytes:
                raise CombinationError(
                    "room",
                    f"megakv.offload.weights = 'disk' needs {needed.format('disk space')}; megakv.offload.disk_gb "
                    f"holds {in_units(config.disk_bytes)}: raise it",
                )
            self.tier = DiskTier(self.nbytes, config.disk_path)
        else:
            if self.nbytes >= config.host_bytes:
                raise CombinationError(
                    "room",
                    f"megakv.offload.weights = true needs {needed.format('host memory')}, and keys and values come on "
                    f"top; megakv.offload.host_gb holds {in_units(config.host_bytes)}: raise it, or put them on disk "
                    "with megakv.offload.weights = 'disk'",
                )
            self.tier = HostTier(self.nbytes, pin=pin, unit=ALIGNMENT)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's budget that they take."""
        return self.nbytes if isinstance(self.tier, HostTier) else 0

    @property
    def disk(self) -> DiskTier | None:
        """The disk that they lie on, if any."""
        return self.tier if isinstance(self.tier, DiskTier) else None

    def moves(self, layer: int, first: int, device: Tensor) -> list[Move]:
        """Copies of a layer's bytes from a row on to ``[n, ALIGNMENT]`` on the accelerator."""
        start, seam = self._starts[layer] + first * ALIGNMENT, self.tier.seam
        stop = start + device.numel()
        ends = [start, *range((start // seam + 1) * seam, stop, seam), stop]
        parts = device.split([(end - begin) // ALIGNMENT for begin, end in pairwise(ends)])
        return [
            Move.of(self.tier.rows(begin, len(part), ALIGNMENT, torch.uint8), part)
            for begin, part in zip(ends, parts, strict=False)
        ]

    def _lies(self, name: str) -> Tensor | FileRows:
        start, place = self._places[name]
        return self.tier.rows(start + place.offset, 1, prod(place.shape), place.dtype)

    def room(self, name: str) -> Tensor | None:
        """Where a parameter is to be written to, for `put` to take it; None for one that stays on the accelerator."""
        if name not in self._places:
            return None
        lies, (_, place) = self._lies(name), self._places[name]
        return lies.view(place.shape) if isinstance(lies, Tensor) else torch.empty(place.shape, dtype=place.dtype)

    def put(self, name: str, value: Tensor) -> Tensor:
        """Keep a parameter that was written to its room; returns what stands for it until `withdraw`."""
        lies, (_, place) = self._lies(name), self._places[name]
        if isinstance(lies, Tensor):
            return value
        lies.write_from(value)
        return place.without_memory(value.device)

    def read(self, name: str) -> Tensor:
        """A parameter that has a room, in host memory."""
        found, lies = self.room(name), self._lies(name)
        assert found is not None
        if not isinstance(lies, Tensor):
            try:
                lies.read_into(found)
            except OSError as error:
                raise MegaKVError(f"{name} cannot be read back from megakv.offload.disk_path: {error}") from error
        return found

    def withdraw(self, model: nn.Module, device: torch.device) -> None:
        """Leave the parameters their shapes and types, on the device, without memory."""
        for place in (place for layer in self.layers for place in layer.places):
            model.get_parameter(place.name).data = place.without_memory(device)

    def close(self) -> None:
        """Give the memory, or the file, back."""
        self.tier.close()
