"""Configs and digests of weights, to tell models apart: cheap, for no more than samples of each tensor are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.distributed.comm import Communicator
from megakv.distributed.mesh import refuse_difference
from megakv.weights.loading import LoadedModel
from megakv.weights.placement import WHOLE

SAMPLES = 1024
"""Elements read of each tensor; all of a smaller one."""
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
    Returns a digest of the weights of all tensor-parallel ranks: of the model, the degree, and the placement of heads.
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
    return _joined(_joined(table.values()) for table in tables[:size])


def _digests(loaded: LoadedModel) -> dict[str, str]:
    """Of every parameter and every buffer that a checkpoint holds, where it lies."""
    found = {}
    for name, tensor in loaded.module.state_dict().items():
        home = None if loaded.host_weights is None else loaded.host_weights.home(name)
        found[name] = _digest(tensor if home is None else home)
    return found


def _digest(tensor: Tensor) -> str:
    bits = tensor.detach().reshape(-1).view(BITS[tensor.dtype.itemsize])
    if len(bits) > SAMPLES:
        bits = bits[torch.arange(SAMPLES, device=bits.device) * STRIDE % len(bits)]
    shape = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return hashlib.blake2b(shape + bits.cpu().numpy().tobytes(), digest_size=8).hexdigest()


def _joined(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _whole_names(loaded: LoadedModel) -> set[str]:
    """Tensors of which every tensor-parallel rank holds the same."""
    cut = {name.rpartition(".")[0] for name, spec in loaded.placement.items() if spec != WHOLE}
    return {
        name
        for name in loaded.module.state_dict()
        # A buffer, such as scales of a weight, is as its module.
        if (loaded.placement[name] == WHOLE if name in loaded.placement else name.rpartition(".")[0] not in cut)
    }
