"""What a decoder layer of the Llama kind does around its attention, of a few rows on processors, in compiled calls.

With few tokens a layer takes as long as its calls: by itself, PyTorch makes some fifty of a few microseconds each.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megakv.attention.compiled import located
from megakv.base.library import TYPES, fault, load

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (F.silu, F.gelu, functools.partial(F.gelu, approximate="tanh"))
"""Of feed-forwards, by the kernel's numbers."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Weight:
    """A linear, or some rows or columns of it: ``[out, in]``, whose rows may lie further apart, and ``[out]``.

    A weight in blocks, ``[out, bytes]``, is of the type that has the number `blocks` in GGML, and of so many `columns`.
    """

    weight: Tensor
    bias: Tensor | None = None
    blocks: int = 0
    columns: int = 0


@dataclass(frozen=True)
class Norm:
    """An RMS norm: ``[n]``, and what is added to the mean square."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """That of one of transformers' modules."""
        return cls(module.weight.detach(), module.variance_epsilon)


@dataclass(frozen=True)
class LayerWeights:
    """What one rank computes of a layer: of every projection all of it, or its part."""

    heads: int
    kv_heads: int
    head_dim: int
    activation: int
    """Which one of `ACTIVATIONS`."""
    input_norm: Norm
    output_norm: Norm
    """Behind attention."""
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    gate: Weight
    up: Weight
    down: Weight
    q_norm: Norm | None = None
    """Of every head, as `k_norm`."""
    k_norm: Norm | None = None
    pairs: bool = False
    """Whether many rows of bfloat16 are multiplied by pairs, which the processor must have."""


class _Linear(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("weight", ctypes.c_void_p), ("step", ctypes.c_int64), ("outputs", ctypes.c_int64),
        ("columns", ctypes.c_int64), ("bias", ctypes.c_void_p), ("biases", ctypes.c_int64), ("blocks", ctypes.c_int64),
    ]  # fmt: skip

    @classmethod
    def of(cls, part: Weight) -> _Linear:
        weight, step = part.weight, part.weight.stride(0) * part.weight.element_size()
        columns = part.columns if part.blocks else weight.shape[1]
        return cls(weight.data_ptr(), step, len(weight), columns, *located(part.bias), part.blocks)


class _Norm(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("weight", ctypes.c_void_p), ("size", ctypes.c_int64), ("eps", ctypes.c_float),
    ]  # fmt: skip


class _Layer(ctypes.Structure):
    COUNTS = ("type", "pairs", "hidden", "heads", "kv_heads", "head_dim", "activation")
    NORMS = ("input_norm", "output_norm", "q_norm", "k_norm")
    LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, ctypes.c_int64) for name in COUNTS),
        *((name, _Norm) for name in NORMS),
        *((name, _Linear) for name in LINEARS),
    ]


class LayerKernel:
    """The compiled calls, of as many threads as PyTorch uses. An OSError says that they cannot be loaded."""

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        number, whole, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        self.project, self.rotate = library.megakv_project, library.megakv_rotate
        self.feed_forward, self.add = library.megakv_feed_forward, library.megakv_add
        self.token_layers = library.megakv_token_layers
        self.normed, self.gated = library.megakv_normed, library.megakv_gated
        self.project.argtypes = [pointer, whole, pointer, pointer, pointer, number, pointer]
        self.rotate.argtypes = [pointer, whole, pointer, pointer, number, pointer]
        self.feed_forward.argtypes = [pointer, whole, pointer, pointer, number, number, number, pointer, pointer]
        self.add.argtypes = [pointer, whole, pointer, pointer, whole, pointer, pointer]
        self.token_layers.argtypes = [
            pointer, whole, pointer, pointer, pointer, whole, whole, whole, *(pointer,) * 3, number, pointer, pointer,
        ]  # fmt: skip
        self.normed.argtypes = [pointer, number, whole, pointer, pointer, number, number, pointer, pointer]
        self.gated.argtypes = [pointer, whole, whole, pointer, pointer, number, number]


class LayerCalls:
    """Those of one layer's `weights`, which must stay where they are: all of the hidden states' type, on processors."""

    def __init__(self, kernel: LayerKernel, weights: LayerWeights):
        self.kernel, self.weights = kernel, weights
        one = weights.input_norm.weight
        self.dtype, self.hidden = one.dtype, len(one)
        self.widths = [weights.heads * weights.head_dim, *(2 * [weights.kv_heads * weights.head_dim])]
        sizes = (getattr(weights, name) for name in _Layer.COUNTS[3:])
        layer = _Layer(TYPES[one.dtype], weights.pairs and one.dtype == torch.bfloat16, len(one), *sizes)
        for name in _Layer.NORMS:
            if (norm := getattr(weights, name)) is not None:
                setattr(layer, name, _Norm(norm.weight.data_ptr(), len(norm.weight), norm.eps))
        for name in _Layer.LINEARS:
            setattr(layer, name, _Linear.of(getattr(weights, name)))
        self._layer, self.address = layer, ctypes.addressof(layer)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, *, whole: bool, out: Tensor | None = None) -> Tensor:
        """``[L, q + k + v]`` of hidden states ``[..., L, h]``; rotated by ``[..., L, D]`` where all heads are here."""
        rows, weights = x.numel() // self.hidden, self.weights
        width = sum(self.widths) if whole else sum(len(part.weight) for part in (weights.q, weights.k, weights.v))
        assert not whole or cos.numel() == sin.numel() == rows * weights.head_dim, "other rotary embeddings"
        out = x.new_empty((rows, width)) if out is None else out
        assert out.shape == (rows, width) and out.is_contiguous()
        angles = (cos.data_ptr(), sin.data_ptr()) if whole else (None, None)
        threads = torch.get_num_threads()
        self._check(self.kernel.project(self.address, rows, x.data_ptr(), *angles, threads, out.data_ptr()))
        return out

    def rotate(self, out: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Queries and keys ``[L, q + k + v]`` that came from several ranks, in place."""
        angles, threads = (cos.data_ptr(), sin.data_ptr()), torch.get_num_threads()
        assert cos.numel() == sin.numel() == len(out) * self.weights.head_dim and out.shape[1] == sum(self.widths)
        self._check(self.kernel.rotate(self.address, len(out), *angles, threads, out.data_ptr()))

    def heads(self, out: Tensor) -> list[Tensor]:
        """``[1, H, L, D]`` of queries, and ``[1, K, L, D]`` of keys and values: views of them."""
        dim, (rows, width) = self.weights.head_dim, out.shape
        first, found = 0, []
        for own in self.widths:
            found.append(out.as_strided((1, own // dim, rows, dim), (rows * width, dim, width, 1), first))
            first += own
        return found

    def feed_forward(
        self, x: Tensor, attended: Tensor, *, projected: bool, whole: bool, into: Sequence[Tensor | None] = (None, None)
    ) -> tuple[Tensor, Tensor]:
        """Hidden states behind attention, and what this rank's part of the feed-forward makes of them; `whole`, the sum
        of both: ``[..., L, h]`` of such before attention, and of what was attended to, or `projected` from it.
        """
        rows, (middle, out) = x.numel() // self.hidden, (torch.empty_like(x) if to is None else to for to in into)
        assert middle.shape == out.shape == x.shape and middle.is_contiguous() and out.is_contiguous()
        assert attended.numel() == rows * (self.hidden if projected else self.widths[0]), "other rows were attended to"
        failed = self.kernel.feed_forward(
            self.address, rows, x.data_ptr(), attended.data_ptr(), projected, whole, torch.get_num_threads(),
            middle.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        self._check(failed)
        return middle, out

    def add(self, middle: Tensor, parts: Tensor, bias: Tensor | None) -> Tensor:
        """``[..., L, h]`` hidden states behind attention, and added to them what all ranks have, ``[N, ..., L, h]``."""
        rows, out = middle.numel() // self.hidden, torch.empty_like(middle)
        offset = None if bias is None else bias.data_ptr()
        assert parts.numel() == len(parts) * middle.numel() and (bias is None or len(bias) == self.hidden)
        failed = self.kernel.add(
            self.address, rows, middle.data_ptr(), parts.data_ptr(), len(parts), offset, out.data_ptr()
        )
        self._check(failed)
        return out

    def normed(self, x: Tensor, added: Tensor | None, dtype: torch.dtype, *, behind: bool) -> tuple[Tensor, Tensor]:
        """Hidden states ``[L, h]`` with what is `added` to them, if anything is, and their norm, the first or the one
        `behind` attention: in that type, which is the layer's or float32, as `added` is.
        """
        middle = x if added is None else torch.empty_like(x)
        out = x.new_empty(x.shape, dtype=dtype)
        summand = None if added is None else added.data_ptr()
        assert x.shape[1] == self.hidden and (added is None or added.shape == x.shape and added.dtype == dtype)
        failed = self.kernel.normed(
            self.address, behind, len(x), x.data_ptr(), summand, dtype != self.dtype, torch.get_num_threads(),
            middle.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        self._check(failed)
        return middle, out

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """``[L, f]`` activations of `gate`, in its place, times `up`: of the layer's type, or float32."""
        rows, width = gate.shape
        assert up.shape == gate.shape and up.dtype == gate.dtype
        sizes, wide, threads = (rows, width), gate.dtype != self.dtype, torch.get_num_threads()
        self._check(self.kernel.gated(self.address, *sizes, gate.data_ptr(), up.data_ptr(), wide, threads))
        return gate

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise fault(code, "a layer's activations")


@functools.cache
def load_layer() -> tuple[LayerKernel | None, str]:
    """The calls, or None and why there are none; compiled, within seconds, if this machine does not have them yet.

    What they give is compared with a model's own layers before they take their place (`megakv.injection.layer_kind`).
    """
    return load("layer", LayerKernel, lambda _kernel: "")
