"""Configs and digests of weights, to tell models apart: all bytes count."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from xxhash import xxh3_128

from megakv.distributed.comm import Communicator
from megakv.distributed.mesh import refuse_difference

VERSION = 2
"""The way in which digests are made; another one finds nothing that was kept with this."""
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
"""Keys of a config that do not count."""
ADAPTED = ("scaling", "_active_adapter", "_disable_adapters")
"""Attributes that decide, beside a module's tensors, what it computes: those of adapters (peft)."""
CHANGING = ("dynamic", "longrope")
"""Kinds of rotary embeddings that rewrite their own tables with the length of the last input."""
CHUNK = 16 << 20
"""Bytes that are brought to the processor at a time."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What a model's config says of its results."""
    return {key: value for key, value in config.to_dict().items() if key not in VOLATILE}


def check_same_config(model: PreTrainedModel, comm: Communicator) -> None:
    """Refuse ranks whose models have different configs: with equal weights they compute other things. Collective."""
    # Values as text: a config may hold what cannot be sent or compared.
    own = json.loads(json.dumps({"the model's config": settings_of(model.config)}, default=str))
    refuse_difference(comm.gather_objects(own), "config.json")


def check_same_weights(contents: Mapping[str, str], comm: Communicator) -> str:
    """Refuse ranks that were given different weights, whose results would be meaningless. Collective.

    `contents` says by name what decides them (`LoadedModel.contents`). Returned is a digest of it all.
    """
    first, *others = comm.gather_objects(dict(contents))
    for name in dict.fromkeys(name for table in (first, *others) for name in table):
        odd = [rank for rank, table in enumerate(others, start=1) if table.get(name) != first.get(name)]
        if odd:
            raise ValueError(
                f"the model's {name} on rank {', '.join(map(str, odd))} is another than on rank 0: give every rank the "
                "same checkpoint, or a module with the same weights"
            )
    return hashlib.sha256(json.dumps([VERSION, sorted(contents.items())]).encode()).hexdigest()


def module_digests(model: PreTrainedModel) -> dict[str, str]:
    """Digests of a module's tensors by name, and what else it says of its results.

    A module whose weights are no tensors that can be read is a ValueError.
    """
    tensors: dict[str, Any] = model.state_dict()
    digests = {"class": type(model).__qualname__}
    for path, module in model.named_modules():
        if not any(kind in str(getattr(module, "rope_type", "")) for kind in CHANGING):
            for leaf in module._non_persistent_buffers_set:
                tensors[f"{path}.{leaf}"] = module._buffers[leaf]
        settings = {name: vars(module)[name] for name in ADAPTED if name in vars(module)}
        digests |= {f"{path}.{name}": str(value) for name, value in settings.items() if _is_plain(value)}
    held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return digests | dict(zip(held, pool.map(_digest, held, held.values()), strict=True))


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list | dict)


def _digest(name: str, tensor: Any) -> str:
    hasher = xxh3_128()
    for part in plain_parts(tensor, hasher.update):
        if not isinstance(part, Tensor) or part.layout != torch.strided or part.is_quantized:
            raise ValueError(
                f"the model given keeps {name} in a way that cannot be read ({type(part).__name__}): allowed: tensors "
                "and subclasses of Tensor with __tensor_flatten__, as torchao's"
            )
        hasher.update(f"{part.dtype} {list(part.shape)}".encode())
        # Of one element any stride passes for contiguous.
        flat = part.contiguous().as_strided((part.numel(),), (1,))
        step = max(1, CHUNK // flat.itemsize)
        for start in range(0, len(flat), step):
            hasher.update(flat[start : start + step].view(torch.uint8).cpu().numpy())
    return hasher.hexdigest()


def plain_parts(tensor: Any, tell: Callable[[bytes], object] = bytes) -> Iterator[Any]:
    """The plain tensors of which one is made: itself, or those within a subclass, whose other contents it tells."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        tell(f"{type(tensor).__qualname__} {names} {ADDRESS.sub('', str(context))}".encode())
        for name in names:
            yield from plain_parts(getattr(tensor, name), tell)
    elif isinstance(tensor, Tensor):
        yield tensor.detach().as_subclass(Tensor)
    else:
        yield tensor
