"""Configs and digests of weights, to tell models apart: cheap, for no more than samples of each tensor are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.distributed.comm import Communicator
from megakv.distributed.mesh import refuse_difference
from megakv.weights.loading import LoadedModel
from megakv.weights.placement import WHOLE

SAMPLES = 1024
"""Elements read of each tensor; all of a smaller one."""
FEW = 16
"""Elements of each tensor that the digest of the whole model has."""
STRIDE = 2654435761
"""Between samples, around the end of the tensor. It is prime, so that none is read twice, and no column is left out."""
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
"""Keys of a config that do not count."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What a model's config says of its results."""
    return {key: value for key, value in config.to_dict().items() if key not in VOLATILE}


def check_same_config(model: PreTrainedModel, comm: Communicator) -> None:
    """Refuse ranks whose models have different configs: with equal weights they compute other things. Collective."""
    # Values as text: a config may hold what cannot be sent or compared.
    own = json.loads(json.dumps({"the model's config": settings_of(model.config)}, default=str))
    refuse_difference(comm.gather_objects(own), "config.json")


def check_same_weights(loaded: LoadedModel, comm: Communicator) -> str:
    """Refuse ranks that were given different weights, whose results would be meaningless. Collective.

    Context-parallel ranks of one tensor-parallel index must hold the same, and all ranks the same of what is not cut.
    Returns a digest of the model's weights. It is the same on any mesh and with any placement of heads, unless some are
    quantised, which each rank has done with its own part of them.
    """
    size = comm.mesh.tp_size
    tables, names = zip(*comm.gather_objects((_digests(loaded), _whole_names(loaded))), strict=True)
    # A tensor may be whole on one rank and cut on another, which has fewer heads of it.
    whole = set.intersection(*names)
    for name in dict.fromkeys(name for table in tables for name in table):
        step = 1 if name in whole else size
        for first in range(step):
            others = [n for n in range(first, len(tables), step) if tables[n].get(name) != tables[first].get(name)]
            if others:
                raise ValueError(
                    f"the model's {name} on rank {', '.join(map(str, others))} is another than on rank {first}: give "
                    "every rank the same checkpoint, or a module with the same weights"
                )
    digest = hashlib.sha256("".join(_digests_of_whole(loaded, comm)).encode())
    for name in sorted(set.union(*map(set, tables[:size])) - _sampled(loaded).keys()):
        digest.update("".join(table.get(name, "") for table in tables[: 1 if name in whole else size]).encode())
    return digest.hexdigest()


def _sampled(loaded: LoadedModel) -> dict[str, _Part]:
    """Parameters whose elements are the same on whatever rank they lie."""
    tensors = loaded.module.state_dict()
    return {
        name: _Part(name, tensor, loaded)
        for name, tensor in tensors.items()
        if name in loaded.placement and tensor.dtype.itemsize > 1
    }


def _digests_of_whole(loaded: LoadedModel, comm: Communicator) -> Iterator[str]:
    """Samples at the same places of every whole parameter, wherever tensor parallelism has put them. Collective."""
    size, parts = comm.mesh.tp_size, _sampled(loaded)
    shapes = comm.gather_objects({name: part.least_shape for name, part in parts.items()})[:size]
    whole = {name: np.max([shape[name] for shape in shapes], axis=0) for name in parts}
    found = comm.gather_objects({name: part.samples(whole[name]) for name, part in parts.items()})[:size]
    for name, part in parts.items():
        # Where several ranks hold an element, it is the same on all of them.
        samples = zip(*(each[name] for each in found), strict=True)
        bits = [next((value for value in held if value is not None), None) for held in samples]
        yield f"{name} {part.tensor.dtype} {whole[name].tolist()} {bits}"


class _Part:
    """What a rank holds of a parameter or buffer, which may be a slice of the whole one."""

    def __init__(self, name: str, tensor: Tensor, loaded: LoadedModel):
        # Of weights that are offloaded the shape and the type alone.
        self.tensor = torch.atleast_1d(tensor.detach())
        self._values = partial(_values, name, tensor, loaded)
        self._spec = loaded.placement[name]

    @property
    def least_shape(self) -> list[int]:
        """Of the whole parameter, as far as it can be told from this part."""
        shape, spec = list(self.tensor.shape), self._spec
        if spec.ranges is not None:
            shape[spec.dim] = max((stop for _, stop in spec.ranges), default=0)
        return shape

    def samples(self, whole: Sequence[int]) -> list[int | None]:
        """Bits of a few elements of the whole parameter; None for those that are not here."""
        spec = self._spec
        count = int(np.prod(whole))
        if spec.zero or not count:
            return [None] * min(count, FEW)
        places = np.unravel_index(np.arange(min(count, FEW)) * STRIDE % count, tuple(whole))
        held = np.ones(len(places[0]), dtype=bool)
        if spec.ranges is not None:
            wanted, local, offset = places[spec.dim], np.full(len(held), -1), 0
            for start, stop in spec.ranges:
                inside = (wanted >= start) & (wanted < stop)
                local[inside] = offset + wanted[inside] - start
                offset += stop - start
            held = local >= 0
            places = (*places[: spec.dim], np.maximum(local, 0), *places[spec.dim + 1 :])
        tensor = torch.atleast_1d(self._values())
        found = tensor[tuple(torch.from_numpy(each[held]).to(tensor.device) for each in places)].reshape(-1)
        bits = iter(found.contiguous().view(BITS[tensor.dtype.itemsize]).tolist())
        return [next(bits) if here else None for here in held]


def _digests(loaded: LoadedModel) -> dict[str, str]:
    """Of every parameter and every buffer that a checkpoint holds, where it lies."""
    found = {}
    for name, tensor in loaded.module.state_dict().items():
        found[name] = _digest(_values(name, tensor, loaded))
    return found


def _values(name: str, tensor: Tensor, loaded: LoadedModel) -> Tensor:
    """A parameter or buffer where it lies; one that lies on disk is read for it."""
    away = None if loaded.layer_weights is None else loaded.layer_weights.read(name)
    return (tensor if away is None else away).detach()


def _digest(tensor: Tensor) -> str:
    bits = tensor.detach().reshape(-1).view(BITS[tensor.dtype.itemsize])
    if len(bits) > SAMPLES:
        bits = bits[torch.arange(SAMPLES, device=bits.device) * STRIDE % len(bits)]
    shape = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return hashlib.blake2b(shape + bits.cpu().numpy().tobytes(), digest_size=8).hexdigest()


def _whole_names(loaded: LoadedModel) -> set[str]:
    """Tensors of which every tensor-parallel rank holds the same."""
    cut = {name.rpartition(".")[0] for name, spec in loaded.placement.items() if spec != WHOLE}
    return {
        name
        for name in loaded.module.state_dict()
        # A buffer, or the scales of a weight, is as its module.
        if (loaded.placement[name] == WHOLE if name in loaded.placement else name.rpartition(".")[0] not in cut)
    }
