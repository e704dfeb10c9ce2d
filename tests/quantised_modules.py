"""Modules whose weights are quantised in the ways of several packages, made of torch alone.

Each way keeps its weights in another form, has a forward of its own, and breaks where its parameters are wrapped anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in 8 bits, and the scales of its rows."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


class Scaled(Tensor):
    """A weight that looks like a dense one and consists of two tensors, as torchao's; it knows no views."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values: Tensor, scale: Tensor):
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], {"rounds": rounded}

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.values * weight.scale, *bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(f"{function} of {cls.__name__}")


class StateParameter(nn.Parameter):
    """Packed numbers that carry what unpacks them, as bitsandbytes' do."""

    scale: Tensor


class StateLinear(nn.Linear):
    """A linear whose weight is a `StateParameter`."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        values, scale = rounded(linear.weight.detach())
        self.weight = StateParameter(values, requires_grad=False)
        self.weight.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.weight.scale)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = self.weight.scale


class PackedLinear(nn.Module):
    """No linear at all, with its weight in buffers, as GPTQ's and AWQ's."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        values, scale = rounded(linear.weight.detach())
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("qweight", values.to(torch.int32))
        self.register_buffer("scales", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.qweight * self.scales)


def subclass(linear: nn.Linear) -> nn.Module:
    """A plain linear with a weight of a tensor subclass."""
    linear.weight = nn.Parameter(Scaled(*rounded(linear.weight.detach())), requires_grad=False)
    return linear


def byte_weight(linear: nn.Linear) -> nn.Module:
    """A linear with a weight of one byte and a forward of its own, as compressed-tensors' FP8."""
    scale = linear.weight.detach().abs().amax(1, keepdim=True) / 448
    linear.weight = nn.Parameter((linear.weight.detach() / scale).to(torch.float8_e4m3fn), requires_grad=False)
    linear.weight_scale = nn.Parameter(scale, requires_grad=False)
    linear.forward = lambda x: F.linear(x, linear.weight.to(x.dtype) * linear.weight_scale)
    return linear


def unpacked_at_first(linear: nn.Linear) -> nn.Module:
    """A linear that has its weight only from its first forward on, as compressed-tensors' integers."""
    values, scale = rounded(linear.weight.detach())
    del linear.weight
    linear.weight_packed = nn.Parameter(values.to(torch.int32), requires_grad=False)
    linear.weight_scale = nn.Parameter(scale, requires_grad=False)

    def unpack(module: Any, _inputs: Any) -> None:
        module.weight = nn.Parameter(module.weight_packed * module.weight_scale, requires_grad=False)
        del module.weight_packed, module.weight_scale
        handle.remove()

    handle = linear.register_forward_pre_hook(unpack)
    return linear


WAYS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "subclass": subclass,
    "state": StateLinear,
    "packed": PackedLinear,
    "byte": byte_weight,
    "unpacked": unpacked_at_first,
}


def quantised(model: PreTrainedModel, way: str) -> PreTrainedModel:
    """The model with the linears of its decoder layers quantised in place, in one of the `WAYS`."""
    layers = model.get_decoder().layers
    found = [(name, module) for name, module in layers.named_modules() if isinstance(module, nn.Linear)]
    for name, linear in found:
        layers.set_submodule(name, WAYS[way](linear))
    return model.eval()
