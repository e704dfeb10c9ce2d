"""A model's parameters filled from where its weights come from, each with the part of it that a rank keeps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from megakv.offload.weights import HostWeights
from megakv.weights.fp8 import Fp8Linear
from megakv.weights.placement import WHOLE, SliceSpec
from megakv.weights.source import WeightSource


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _local(
    source: WeightSource,
    name: str,
    spec: SliceSpec,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    home: Tensor | None = None,
) -> Tensor:
    """Memory of this rank's own with its part of a parameter; the very memory of the source where that has given it."""
    if home is not None:
        return home.zero_() if spec.zero else home.copy_(source.read(name, spec))
    if spec.zero:
        return torch.zeros(shape, dtype=dtype, device=device)
    value = source.read(name, spec)
    if source.owned and spec.ranges is None and value.dtype == dtype and value.device == device:
        return value
    return torch.empty(shape, dtype=dtype, device=device).copy_(value)


def materialise(
    model: PreTrainedModel,
    source: WeightSource,
    placement: dict[str, SliceSpec],
    dtypes: dict[str, torch.dtype],
    device: torch.device,
    *,
    host: HostWeights | None = None,
    progress: bool = False,
) -> None:
    """Fill a model's parameters from a source, one at a time, and move its buffers.

    Parameters
    ----------
    model : PreTrainedModel
        With parameters of local shapes; tied ones stay tied. Each weight of an `Fp8Linear` is quantised as it comes.
    placement : dict
        The part of each parameter that is kept.
    dtypes : dict
        The type of each parameter.
    host : HostWeights, optional
        Memory of the parameters that do not go to the device.
    progress : bool
        Whether to show a bar of the bytes that are filled in.
    """
    names: dict[int, list[str]] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    total = sum(parameters[tied[0]].numel() * dtypes[tied[0]].itemsize for tied in names.values())
    with tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for tied in names.values():
            stored = next((name for name in tied if source.has(name)), tied[0])
            spec = placement.get(stored, WHOLE)
            home = None if host is None else host.home(tied[0])
            local = _local(source, stored, spec, parameters[tied[0]].shape, dtypes[stored], device, home)
            filled = nn.Parameter(local, requires_grad=False)
            for name in tied:
                module, leaf = _owner(model, name)
                if isinstance(module, Fp8Linear) and leaf == "weight":
                    module.quantise(local)
                else:
                    setattr(module, leaf, filled)
            bar.update(local.nbytes)
            # What was quantised goes before the next is read.
            del local, filled
    for name, buffer in model.named_buffers():
        module, leaf = _owner(model, name)
        stored_too = name in dtypes and source.has(name)
        module._buffers[leaf] = (
            _local(source, name, WHOLE, buffer.shape, dtypes[name], device) if stored_too else buffer.to(device)
        )
