"""Row-wise FP8 weights of feed-forward layers (Context Parallelism, Section 4.1): one byte each, products in FP8.

Every row of a weight and every token's activations are divided by a scale of their own, so that the largest value of
the row becomes the largest of float8_e4m3fn; `torch._scaled_mm` multiplies the scales back. On CPU, where most versions
of torch lack that, the same numbers are computed in float32: half the bytes, but slower than the weights' own type.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.laws import CombinationError
from megakv.weights.placement.plan import ROUTERS, decoder_layers
from megakv.weights.tensor_parallel import AllReduce, RowParallelLinear

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# What `torch._scaled_mm` wants both dimensions of a weight to be multiples of.
MULTIPLE = 16
# Elements converted at a time: the float32 copy stays that small.
CHUNK = 4 << 20
FIRST_CAPABILITY = (8, 9)
# The self-check's products are of exact FP8 values; only the result is rounded, to bfloat16 at worst.
TOLERANCE = 1e-2


def quantise_rows(x_RC: Tensor, *, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Rows of any floating type in FP8, and their float32 scales ``[R, 1]``: values times scale is x.

    Zeros are added up to a multiple of 16 columns and `multiple` rows.
    """
    rows, columns = x_RC.shape
    shape = (_up(rows, multiple), _up(columns, MULTIPLE))
    values = torch.empty(shape, dtype=FP8, device=x_RC.device)
    if shape != (rows, columns):
        values.zero_()
    scales = torch.ones(shape[0], 1, dtype=torch.float32, device=x_RC.device)
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        part = x_RC[start : start + step].float()
        stop = start + len(part)
        # Never 0, and never so small that its own rounding lifts a value above the largest, which would become NaN.
        scale = (part.abs().amax(-1, keepdim=True) / LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
        values[start:stop, :columns] = part / scale
        scales[start:stop] = scale
    return values, scales


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


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


class Fp8Linear(nn.Module):
    """A linear, whole or spread over ranks, whose weight is FP8 with a scale for each output.

    The weight ``[out, in]`` has no memory at first, then zeros added up to multiples of 16; there are as many scales
    ``[1, out]`` as it has rows. The bias of the linear that it takes the place of stays in its type, and is added once,
    after the sum over ranks of a row-parallel one.
    """

    weight_scale: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.weight = nn.Parameter(torch.empty(linear.weight.shape, dtype=FP8, device="meta"), requires_grad=False)
        self.register_buffer("weight_scale", torch.empty(1, self.out_features, device="meta"))
        self.bias = linear.bias
        self._all_reduce: AllReduce | None = linear.all_reduce if isinstance(linear, RowParallelLinear) else None

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weight and its scales once they are filled."""
        rows = _up(self.out_features, MULTIPLE)
        return rows * _up(self.in_features, MULTIPLE) * FP8.itemsize + rows * torch.float32.itemsize

    def quantise(self, weight: Tensor) -> None:
        """Take the values of an unquantised weight ``[out, in]``, of which nothing is kept."""
        values, scales = quantise_rows(weight, multiple=MULTIPLE)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight_scale = scales.t()

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]`` in the type of x."""
        values, scales = quantise_rows(x.reshape(-1, self.in_features))
        product = cpu_product if x.device.type == "cpu" else scaled_product
        out = product(values, scales, self.weight, self.weight_scale)
        out = out[:, : self.out_features].to(x.dtype).reshape(*x.shape[:-1], self.out_features)
        if self._all_reduce is not None:
            out = self._all_reduce(out.contiguous())
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, row-wise {FP8}"


def feed_forward_linears(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """The linears of a decoder layer outside its attention, as parent and name; routers are none of them."""
    found: list[tuple[nn.Module, str]] = []
    for name, child in layer.named_children():
        if isinstance(child, nn.Linear):
            if name not in ROUTERS:
                found.append((layer, name))
        elif "Attention" not in type(child).__name__:
            found += feed_forward_linears(child)
    return found


def use_fp8(model: PreTrainedModel) -> None:
    """Put an `Fp8Linear` without memory in the place of every feed-forward linear of every decoder layer.

    Refused where there is none, or experts: three-dimensional weights, which `torch._scaled_mm` does not take.
    """
    try:
        _, layers = decoder_layers(model)
    except ValueError as error:
        raise _refusal(model, "it has no list of decoder layers") from error
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if parameter.ndim > 2:
                raise _refusal(model, f"{name} holds the weights of several experts in one")
        linears = feed_forward_linears(layer)
        if not linears:
            raise _refusal(model, f"{type(layer).__name__} has no linear outside its attention")
        for parent, name in linears:
            setattr(parent, name, Fp8Linear(getattr(parent, name)))


def _refusal(model: PreTrainedModel, why: str) -> ValueError:
    return ValueError(
        f"megakv.feed_forward = 'fp8' is not supported for model type {model.config.model_type!r}: {why}; use 'dtype'"
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
            "machine", f"megakv.feed_forward = 'fp8' cannot be used on {device}: {problem}; use 'dtype'"
        )


def _error(device: torch.device) -> float:
    """Largest error of a small product over the largest result, with odd sizes, against exact arithmetic."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 72, generator=generator).to(device) for rows in (40, 5))
    linear = Fp8Linear(nn.Linear(72, 40, bias=False, device="meta"))
    linear.quantise(weight)
    values, scales = quantise_rows(x)
    exact = (values.double() * scales) @ (linear.weight.double() * linear.weight_scale.t()).t()
    return float((linear(x).double() - exact[:, :40]).abs().max() / exact.abs().max())
