"""Modules that are handed over with quantised weights: kept as they are, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.weights.formats import AS_STORED, LoadRequest
from megakv.weights.tensor_parallel import RowParallelLinear

PLAIN = (Tensor, nn.Parameter)


def is_plain(tensor: Tensor | None) -> bool:
    """Whether a weight is a dense tensor of numbers that can be cut and multiplied with: no subclass, no 8-bit type."""
    return (
        isinstance(tensor, Tensor)
        and type(tensor) in PLAIN
        and tensor.layout == torch.strided
        and tensor.dtype.is_floating_point
        and tensor.dtype.itemsize > 1
    )


def is_known_class(module: nn.Module) -> bool:
    """Whether a module is of torch or of a model family of transformers, whose tensors are all in the open."""
    return type(module).__module__.startswith(("torch.nn.modules.", "transformers.models."))


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name: those of `state_dict`, which repacks bitsandbytes' for good."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                found[f"{path}.{leaf}" if path else leaf] = buffer
    return found


def is_plain_linear(module: Any) -> bool:
    """Whether a module does no more than multiply with a plain weight, which then may be done in another way."""
    exact = type(module) in (nn.Linear, RowParallelLinear) and not _has_own_forward(module)
    return exact and is_plain(module._parameters.get("weight"))


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a module computes something else than its class."""
    return "forward" in vars(module) or hasattr(module, "quantization_scheme")


def quantised_by(model: PreTrainedModel) -> str | None:
    """The first weight of a model that is none of a plain linear, in words; None where there is none."""
    config = getattr(model.config, "quantization_config", None)
    method = (config if isinstance(config, dict) else getattr(config, "__dict__", {})).get("quant_method", "")
    found = next(_not_plain(model), None)
    return f"{getattr(method, 'value', method)}: {found}" if found and method else found


def _not_plain(model: PreTrainedModel) -> Iterator[str]:
    for name, tensor in stored_tensors(model).items():
        if not is_plain(tensor) and (isinstance(tensor, nn.Parameter) or tensor.ndim > 1):
            yield f"{name} is a {type(tensor).__name__} of {tensor.dtype}"
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not is_known_class(module):
            yield f"{name} is a {type(module).__module__}.{type(module).__qualname__}"
        elif isinstance(module, nn.Linear) and _has_own_forward(module):
            yield f"{name} has a forward of its own"


def keep_quantised(model: PreTrainedModel, how: str, request: LoadRequest, setting: str) -> None:
    """Make a quantised module ready where it is, its parameters untouched; a ValueError names what would change them.

    `setting` is ``megakv.weights.format``.
    """
    changed = {
        f"megakv.weights.format = {setting!r}": setting != AS_STORED,
        f"dtype = {request.dtype}": request.dtype not in (None, model.dtype),
    }
    refuse_changes(f"the model given, whose weights are quantised ({how}) and stay as they are", request, changed)
    settle(model, request.device)


def refuse_changes(what: str, request: LoadRequest, changed: Mapping[str, bool] | None = None) -> None:
    """Refuse settings that would cut, move or otherwise change quantised weights, by their names."""
    cut = {
        f"tensor_parallel.tp_size = {request.tp_size}": request.tp_size > 1,
        "megakv.offload.weights = true": request.offloaded,
    }
    for setting, given in (cut | dict(changed or {})).items():
        if given:
            raise ValueError(
                f"{setting} is not supported for {what}: leave it out, and share the work by "
                "megakv.context_parallel.size; or load it unquantised"
            )


def settle(model: PreTrainedModel, device: torch.device) -> None:
    """Bring a quantised module to its device; what unpacks its weights at the first forward is given one."""
    if any(tensor.device != device for tensor in (*model.parameters(), *model.buffers())):
        model.to(device)
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64, device=device))
