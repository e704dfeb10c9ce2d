"""Row-wise FP8 weights of feed-forward layers (Context Parallelism, Section 4.1): one byte each, products in FP8.

Every row of a weight and every token's activations are divided by a scale of their own, so that the largest value of
the row becomes the largest of float8_e4m3fn; `torch._scaled_mm` multiplies the scales back. On CPU, where most versions
of torch lack that, the same numbers are computed in float32: half the bytes, but slower than the weights' own type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.base.errors import CombinationError
from megakv.weights.formats.format import LoadRequest, Owner, WeightFormat
from megakv.weights.placement.plan import (
    EXPERT_WEIGHTS,
    decoder_layers,
    feed_forward_linears,
    is_experts,
    unknown_experts,
)
from megakv.weights.tensor_parallel import AllReduce, RowParallelLinear

FP8 = torch.float8_e4m3fn
SCALE = "_scale"
"""Behind a weight's name: its scales."""
LARGEST = torch.finfo(FP8).max
# What `torch._scaled_mm` wants both dimensions of a weight to be multiples of.
MULTIPLE = 16
# Elements converted at a time: the float32 copy stays that small.
CHUNK = 4 << 20
FIRST_CAPABILITY = (8, 9)
# The self-check's products are of exact FP8 values; only the result is rounded, to bfloat16 at worst.
TOLERANCE = 1e-2


def quantise_rows(x_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of any floating type in FP8, and their float32 scales ``[R, 1]``: values times scale is x.

    Zeros are added up to a multiple of 16 columns.
    """
    rows, columns = x_RC.shape
    values = torch.empty(rows, _up(columns), dtype=FP8, device=x_RC.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x_RC.device)
    _quantise_into(values, scales, x_RC)
    return values, scales


def _quantise_into(values: Tensor, scales: Tensor, x_RC: Tensor) -> None:
    """The same into memory that is there, which may have more rows: of zeros, with a scale of 1."""
    rows, columns = x_RC.shape
    if values.shape != (rows, columns):
        values.zero_()
        scales.fill_(1.0)
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        part = x_RC[start : start + step].float()
        stop = start + len(part)
        # Never 0, and never so small that its own rounding lifts a value above the largest, which would become NaN.
        scale = (part.abs().amax(-1, keepdim=True) / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
        values[start:stop, :columns] = part / scale
        scales[start:stop] = scale


def _up(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


def scaled_product(values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """``[L, in]`` FP8 values with scales ``[L, 1]`` times ``[out, in]`` with ``[1, out]``: ``[L, out]`` in bfloat16.

    Of the types that the row-wise kernels of all GPUs give that is the one without overflow; its rounding is far below
    FP8's.
    """
    return torch._scaled_mm(values, weight.t(), scale_a=scales, scale_b=weight_scale, out_dtype=torch.bfloat16)


def cpu_product(values: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """What `scaled_product` computes, in float32, with no more than a few rows of the weight decoded at a time."""
    x = _decoded(values)
    out = x.new_empty(len(values), len(weight))
    step = max(1, CHUNK // weight.shape[1])
    for start in range(0, len(weight), step):
        torch.mm(x, _decoded(weight[start : start + step]).t(), out=out[:, start : start + step])
    # Both sides were decoded to 2^-8 of themselves.
    return out.mul_(scales * 2.0**16).mul_(weight_scale)


def _decoded(values: Tensor) -> Tensor:
    """2^-8 times FP8 values in float32: their bits moved to where float16 has them, its exponents being 8 above.

    torch's own conversion takes 14 times as long on CPU. A NaN becomes a number, but the scale of its row is none then.
    """
    bits = values.view(torch.int8).to(torch.int16)
    # The sign was extended: after the shift it stands twice.
    return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float()


def _product(x: tuple[Tensor, Tensor], weight: Tensor, weight_scale: Tensor, outputs: int) -> Tensor:
    """``[L, outputs]`` of quantised rows and a weight, in float32 or bfloat16."""
    product = cpu_product if weight.device.type == "cpu" else scaled_product
    return product(*x, weight, weight_scale)[:, :outputs]


def _make_room(module: nn.Module, name: str, shape: Sequence[int]) -> None:
    """Let a module's weight be FP8, ``[..., out, in]``, with a scale for each output, ``[..., 1, out]``.

    Neither has memory at first. Both sizes go up to multiples of 16; what is added is zero once they are filled.
    """
    *several, rows, columns = shape
    for key, size, dtype in (
        (name, (*several, _up(rows), _up(columns)), FP8),
        (name + SCALE, (*several, 1, _up(rows)), torch.float32),
    ):
        module.register_parameter(key, nn.Parameter(torch.empty(size, dtype=dtype, device="meta"), requires_grad=False))


def quantise(module: nn.Module, name: str, weight: Tensor, homes: Sequence[Tensor | None] = (None, None)) -> None:
    """Fill a module's FP8 weight and its scales from an unquantised weight, of which nothing is kept.

    They get memory on its device, unless there are `homes` for the two.
    """
    filled = []
    for key, home in zip((name, name + SCALE), homes, strict=True):
        memory = torch.empty_like(getattr(module, key), device=weight.device) if home is None else home
        setattr(module, key, nn.Parameter(memory, requires_grad=False))
        filled.append(memory)
    several = [each if each.dim() == 3 else each[None] for each in (*filled, weight.detach())]
    transposed = getattr(module, "is_transposed", False)
    for values, scales, rows in zip(*several, strict=True):
        _quantise_into(values, scales.t(), rows.t() if transposed else rows)


class Fp8Linear(nn.Module):
    """A linear, whole or spread over ranks, whose weight is FP8 with a scale for each output (see `quantise`).

    The bias of the linear that it takes the place of stays in its type, and is added once, after the sum over ranks of
    a row-parallel one.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        _make_room(self, "weight", linear.weight.shape)
        self.bias = linear.bias
        self._all_reduce: AllReduce | None = linear.all_reduce if isinstance(linear, RowParallelLinear) else None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]`` in the type of x."""
        rows = quantise_rows(x.reshape(-1, self.in_features))
        out = _product(rows, self.weight, self.weight_scale, self.out_features)
        out = out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)
        if self._all_reduce is not None:
            out = self._all_reduce(out.contiguous())
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, row-wise {FP8}"


class Fp8Experts:
    """In the place of the `forward` of one module that holds all experts of a layer, whose weights become FP8.

    Its class, its gate and its biases stay. What a token brings is quantised once, for whichever experts it goes to;
    they are computed one after the other.
    """

    def __init__(self, module: nn.Module):
        self.experts: Any = module
        self.outputs: dict[str, int] = {}
        for name in EXPERT_WEIGHTS:
            weights = getattr(module, name)
            shape = (weights.mT if module.is_transposed else weights).shape
            _make_room(module, name, shape)
            self.outputs[name] = shape[1]

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[L, h]`` to the same, by the experts ``[L, k]`` of every token and how much each of them counts."""
        values, scales = quantise_rows(hidden_states)
        chosen, each = top_k_index.reshape(-1), top_k_index.shape[-1]
        # The host has to know whom tokens go to; whom none goes to is left out.
        counts = torch.bincount(chosen, minlength=len(self.experts.down_proj)).tolist()
        found = hidden_states.new_empty(len(chosen), hidden_states.shape[-1])
        for expert, places in enumerate(chosen.argsort(stable=True).split(counts)):
            if len(places):
                tokens = places // each
                rows = values.view(torch.uint8)[tokens].view(FP8), scales[tokens]
                inner = self.experts._apply_gate(self._project(expert, "gate_up_proj", rows, found.dtype))
                found[places] = self._project(expert, "down_proj", quantise_rows(inner), found.dtype)
        weighted = found * top_k_weights.reshape(-1, 1)
        return weighted.unflatten(0, (-1, each)).sum(1).to(found.dtype)

    def _project(self, expert: int, name: str, rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        weight, scale = (getattr(self.experts, key)[expert] for key in (name, name + SCALE))
        bias = getattr(self.experts, f"{name}_bias", None)
        out = _product(rows, weight, scale, self.outputs[name]).to(dtype)
        return out if bias is None else out + bias[expert]


def use_fp8(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Let the weights of every decoder layer's feed-forward, its linears and experts, be FP8, without memory yet.

    Returns the types of these weights and of their scales, by name. Refused where there are none, or experts that are
    stored in a way that is not known.
    """
    try:
        _, layers = decoder_layers(model)
    except ValueError as error:
        raise _refusal(model, "it has no list of decoder layers") from error
    for layer in layers:
        linears, experts = feed_forward_linears(layer), [module for module in layer.modules() if is_experts(module)]
        reasons = [f"{type(module).__name__} {reason}" for module in experts if (reason := unknown_experts(module))]
        known = {id(parameter) for module in experts for parameter in module.parameters()}
        for name, parameter in layer.named_parameters():
            if parameter.ndim > 2 and id(parameter) not in known:
                reasons.append(f"{name} holds the weights of several experts in one")
        if not linears and not experts:
            reasons.append(f"{type(layer).__name__} has no linear outside its attention")
        if reasons:
            raise _refusal(model, reasons[0])
        for parent, name in linears:
            setattr(parent, name, Fp8Linear(getattr(parent, name)))
        for module in experts:
            module.forward = Fp8Experts(module)
    quantised = [name for name, parameter in model.named_parameters() if parameter.dtype == FP8]
    return dict.fromkeys(quantised, FP8) | dict.fromkeys((name + SCALE for name in quantised), torch.float32)


def _refusal(model: PreTrainedModel, why: str) -> ValueError:
    return ValueError(
        f"megakv.weights.format = 'fp8' is not supported for model type {model.config.model_type!r}: {why}; leave it "
        "out"
    )


def check_device(device: torch.device) -> None:
    """Refuse a device on which FP8 products are missing or wrong, before anything is loaded."""
    problem = ""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        problem = f"{torch.cuda.get_device_name(device)} has compute capability {found}, 8.9 or more is needed"
    else:
        try:
            error = _error(device)
            if not error <= TOLERANCE:
                problem = f"torch {torch.__version__} computes FP8 products wrong there, by {error:.1e}"
        except (RuntimeError, ValueError, TypeError) as failure:
            problem = f"torch {torch.__version__} has no FP8 products there ({failure})"
    if problem:
        raise CombinationError(
            "machine", f"megakv.weights.format = 'fp8' cannot be used on {device}: {problem}; leave it out"
        )


def _error(device: torch.device) -> float:
    """Largest error of a small product over the largest result, with odd sizes, against exact arithmetic."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 72, generator=generator).to(device) for rows in (40, 5))
    linear = Fp8Linear(nn.Linear(72, 40, bias=False, device="meta"))
    quantise(linear, "weight", weight)
    values, scales = quantise_rows(x)
    exact = (values.double() * scales) @ (linear.weight.double() * linear.weight_scale.t()).t()
    return float((linear(x).double() - exact[:, :40]).abs().max() / exact.abs().max())


class Fp8Format(WeightFormat):
    """Feed-forward weights, experts among them, in row-wise FP8, made of plain ones as they are read."""

    name = "fp8"
    at_load = True
    loses = "weights of feed-forward layers and their inputs are rounded to 8-bit floats"

    def check(self, request: LoadRequest, config: PreTrainedConfig) -> None:
        check_device(request.device)

    def prepare(self, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        types = use_fp8(model)
        self.made = {name: (name, name + SCALE) for name, dtype in types.items() if dtype == FP8}
        return types

    def make(self, owners: Sequence[Owner], part: Tensor, homes: Sequence[Tensor | None]) -> None:
        for module, leaf in owners:
            quantise(module, leaf, part, homes)

    def contents(self, tp_size: int) -> dict[str, str]:
        # Ranks quantise their own parts of a row: other parts are other weights.
        return {"feed-forward": f"fp8 by {tp_size}"}
