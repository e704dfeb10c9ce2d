"""Rows times a weight on processors, in C++: of few rows each weight is read once, as fast as memory gives it.

PyTorch's product of one row with 16-bit weights reads them at a half to a third of that rate.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import timeit
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakv.attention.compiled import located
from megakv.base.library import TYPES, fault, load

FEW_ROWS = 16
"""Rows up to which it is taken on all processors; on some of more, and on some of any number."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class LinearKernel:
    """Products of few rows, with as many threads as PyTorch uses in the calling one.

    They are summed up in float32, and rounded once. An OSError says that the compiled library cannot be loaded.
    """

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        number, whole, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        table = pointer, whole, whole
        self._call, self._unpack = library.megakv_product, library.megakv_unpack
        self._call.argtypes = [number, number, *table, *table, whole, pointer, whole, whole, number, pointer]
        self._unpack.argtypes = [number, *table, whole, whole, number, pointer]

    @staticmethod
    def computes(x: Tensor, weight: Tensor, bias: Tensor | None, most_rows: int | None = FEW_ROWS) -> bool:
        """Whether these are for it, if they have no more rows than that.

        It reads addresses, so what does not fit together must not come to it.
        """
        fits = x.shape[-1] == weight.shape[-1] and x.dtype == weight.dtype
        return fits and LinearKernel.reads(x, weight, bias, most_rows)

    @staticmethod
    def reads(x: Tensor, weight: Tensor, bias: Tensor | None, most_rows: int | None) -> bool:
        """The same of a weight in bytes, if its blocks are of as many columns as x has."""
        plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter) and not torch.is_grad_enabled()
        if not plain or x.device.type != "cpu" or weight.device.type != "cpu" or weight.dim() != 2:
            return False
        outputs, columns = weight.shape
        # One row for all, as `expand` gives, is none that it goes through.
        fits = x.dtype in TYPES and weight.stride(1) == 1 and (outputs < 2 or weight.stride(0) >= columns)
        if bias is not None:
            fits = fits and bias.dtype == x.dtype and bias.shape == (outputs,) and bias.stride(0) == 1
        return fits and x.numel() > 0 and (most_rows is None or x.numel() <= most_rows * x.shape[-1])

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pairs: bool = False, blocks: int = 0
    ) -> Tensor:
        """``[..., out]`` of ``[..., in]`` and ``[out, in]``, whose rows may lie further apart, that it `computes`.

        Many rows of bfloat16 are multiplied by `pairs`, which the processor must have. A weight in bytes, which it
        `reads`, is in `blocks` of the type that has this number in GGML.
        """
        (outputs, inputs), (*rows, columns) = weight.shape, x.shape
        x, out = x.contiguous(), x.new_empty((*rows, outputs))
        if code := self._call(
            TYPES[x.dtype], pairs, x.data_ptr(), x.numel() // columns, columns, weight.data_ptr(),
            weight.stride(0) * weight.element_size(), outputs, columns if blocks else inputs, *located(bias), blocks,
            torch.get_num_threads(), out.data_ptr(),
        ):  # fmt: skip
            raise fault(code, f"{x.numel()} elements in float32")
        return out

    def unpack(self, packed: Tensor, columns: int, blocks: int, out: Tensor) -> Tensor:
        """Rows of bytes in such blocks, which may lie further apart, to ``[rows, columns]`` of a type."""
        assert out.shape == (len(packed), columns) and out.is_contiguous()
        threads = torch.get_num_threads()
        address, step = packed.data_ptr(), packed.stride(0)
        kind = TYPES[out.dtype]
        if code := self._unpack(kind, address, step, len(packed), columns, blocks, threads, out.data_ptr()):
            raise fault(code, "rows of a weight")
        return out


def seconds_by_turns(products: Iterable[Callable[..., Tensor]], *inputs: Tensor, trials: int) -> list[float]:
    """Seconds of each, at best: by turns, for whatever else starts up here comes and goes."""
    calls = [functools.partial(each, *inputs) for each in products]
    with torch.no_grad():
        rounds = [[timeit.timeit(each, number=1) for each in calls] for _ in range(trials)]
    return [min(found) for found in zip(*rounds, strict=True)]


@functools.cache
def load_linear() -> tuple[LinearKernel | None, str]:
    """The kernel, or None and why there is none; compiled, within seconds, if this machine does not have it yet."""
    return load("linear", LinearKernel, _problem)


def _problem(kernel: LinearKernel) -> str:
    """What is wrong with its results on a small example; empty if nothing is."""
    # Whatever device is the default one.
    generator = torch.Generator("cpu").manual_seed(0)
    for (dtype, tolerance), rows in itertools.product(TOLERANCE.items(), (7, 37)):
        x, wide, bias = (
            torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in ((rows, 83), (21, 99), (21,))
        )
        weight = wide[:, 5:88]
        expected = F.linear(x.double(), weight.double(), bias.double())
        found = kernel(x, weight, bias).double()
        if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
            return f"compiled, its products in {dtype} differ from the reference by more than {tolerance}"
    return ""
