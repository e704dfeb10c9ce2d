"""Configs and digests of weights, to tell models apart: all bytes count."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from xxhash import xxh3_128

from megakv.distributed.comm import Communicator
from megakv.distributed.mesh import refuse_difference
from megakv.weights.quantised import is_known_class

VERSION = 2
"""The way in which digests are made; another one finds nothing that was kept with this."""
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
"""Keys of a config that do not count."""
ADAPTED = ("scaling", "_active_adapter", "_disable_adapters")
"""Attributes that decide, beside a module's tensors, what it computes: those of adapters (peft)."""
CHANGING = ("dynamic", "longrope")
"""Kinds of rotary embeddings that rewrite their own tables with the length of the last input."""
MODULE = frozenset(vars(nn.Module()))
"""Attributes of every module."""
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

    A module whose weights cannot be read is a ValueError.
    """
    held: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    digests = {"class": type(model).__qualname__}
    for path, module in model.named_modules():
        changing = any(kind in str(getattr(module, "rope_type", "")) for kind in CHANGING)
        left_out = module._non_persistent_buffers_set if changing else ()
        held |= {f"{path}.{leaf}": buffer for leaf, buffer in module._buffers.items() if leaf not in left_out}
        if not is_known_class(module):
            # Parts of a weight may lie in whatever it likes.
            held[f"{path} ({type(module).__name__})"] = {k: v for k, v in vars(module).items() if k not in MODULE}
        settings = {name: vars(module)[name] for name in ADAPTED if name in vars(module)}
        digests |= {f"{path}.{name}": str(value) for name, value in settings.items() if _is_plain(value)}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return digests | dict(zip(held, pool.map(_digest, held, held.values()), strict=True))


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list | dict)


def _digest(name: str, holder: Any) -> str:
    hasher = xxh3_128()
    for part in plain_parts(holder, hasher.update):
        if not isinstance(part, Tensor) or part.layout != torch.strided or part.is_quantized:
            raise ValueError(
                f"the model given keeps {name} in a way that cannot be read ({type(part).__name__}): allowed: tensors, "
                "and subclasses of Tensor with __tensor_flatten__, as torchao's"
            )
        hasher.update(f"{part.dtype} {list(part.shape)}".encode())
        # Of one element any stride passes for contiguous.
        flat = part.contiguous().as_strided((part.numel(),), (1,))
        step = max(1, CHUNK // flat.itemsize)
        for start in range(0, len(flat), step):
            hasher.update(flat[start : start + step].view(torch.uint8).cpu().numpy().data)
    return hasher.hexdigest()


def plain_parts(
    holder: Any, tell: Callable[[bytes], object] = bytes, within: frozenset[int] = frozenset()
) -> Iterator[Any]:
    """The plain tensors that a tensor, or any other object, consists of; `tell` hears how they belong together.

    Bitsandbytes' parameters carry theirs as attributes. What holds numbers and cannot be read comes as it is.
    """
    if id(holder) in within or isinstance(holder, nn.Module) or callable(holder):
        return
    parts: dict[Any, Any] = {}
    if hasattr(holder, "__tensor_flatten__"):
        names, context = holder.__tensor_flatten__()
        tell(f"{type(holder).__qualname__} {ADDRESS.sub('', str(context))}".encode())
        parts = {name: getattr(holder, name) for name in names}
    elif isinstance(holder, Tensor):
        yield holder.detach().as_subclass(Tensor)
        parts = vars(holder)
    elif isinstance(holder, torch.ScriptObject):
        yield holder
    elif isinstance(holder, dict):
        parts = holder
    elif isinstance(holder, list | tuple):
        parts = dict(enumerate(holder))
    else:
        parts = getattr(holder, "__dict__", {})
    for name, part in parts.items():
        tell(str(name).encode())
        yield from plain_parts(part, tell, within | {id(holder)})
