"""Tensors that are not read yet, on which transformers' checkpoint conversions can be traced.

transformers merges and splits checkpoint tensors by `torch.stack`, `torch.cat`, `torch.chunk` and the like. Run on
lazy tensors, the same conversions say which stored bytes make up any part of a parameter, so that a rank reads only
that part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megakv.weights.placement.slices import Ranges, SliceSpec

Read = Callable[[int, Ranges], Tensor]


class LazyTensor:
    """A tensor of known shape whose parts can be read: ``read(dim, ranges)`` is it, cut to `ranges` along `dim`."""

    def __init__(self, shape: Sequence[int], read: Read):
        self.shape = torch.Size(shape)
        self.read = read

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> LazyTensor:
        return self

    def whole(self) -> Tensor:
        """All of it."""
        if not self.shape:
            return self.read(0, ())
        return self.read(0, ((0, self.shape[0]),))

    def __getattr__(self, name: str) -> Any:
        # Any other operation of a conversion works on the values.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (traced := TRACED.get(function)) is not None:
            return traced(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.whole, (args, kwargs or {}))
        return function(*args, **kwargs)


def from_tensor(tensor: Tensor) -> LazyTensor:
    """A lazy tensor over values that are there."""

    return LazyTensor(tensor.shape, lambda dim, ranges: SliceSpec(dim, ranges).take(tensor) if tensor.ndim else tensor)


def _lazy(thing: LazyTensor | Tensor) -> LazyTensor:
    return thing if isinstance(thing, LazyTensor) else from_tensor(thing)


def _stack(tensors: Sequence[Any], dim: int = 0) -> LazyTensor:
    parts = [_lazy(tensor) for tensor in tensors]
    inner = parts[0].shape
    if any(part.shape != inner for part in parts):
        raise ValueError(f"tensors of shapes {[list(part.shape) for part in parts]} cannot be stacked")
    axis = dim % (len(inner) + 1)

    def read(cut: int, ranges: Ranges) -> Tensor:
        if cut == axis:
            chosen = [parts[index].whole() for start, stop in ranges for index in range(start, stop)]
        else:
            chosen = [part.read(cut - (cut > axis), ranges) for part in parts]
        return torch.stack(chosen, dim=axis)

    return LazyTensor((*inner[:axis], len(parts), *inner[axis:]), read)


def _concatenate(tensors: Sequence[Any], dim: int = 0) -> LazyTensor:
    parts = [_lazy(tensor) for tensor in tensors]
    first = parts[0].shape
    axis = dim % len(first)
    sizes = [part.shape[axis] for part in parts]
    if any((*p.shape[:axis], *p.shape[axis + 1 :]) != (*first[:axis], *first[axis + 1 :]) for p in parts):
        raise ValueError(f"tensors of shapes {[list(p.shape) for p in parts]} cannot be joined along {axis}")

    def read(cut: int, ranges: Ranges) -> Tensor:
        if cut != axis:
            return torch.cat([part.read(cut, ranges) for part in parts], dim=axis)
        found = []
        for start, stop in ranges:
            begin = 0
            for part, size in zip(parts, sizes, strict=True):
                low, high = max(start - begin, 0), min(stop - begin, size)
                if low < high:
                    found.append(part.read(axis, ((low, high),)))
                begin += size
        return found[0] if len(found) == 1 else torch.cat(found, dim=axis)

    return LazyTensor((*first[:axis], sum(sizes), *first[axis + 1 :]), read)


def _narrow(tensor: LazyTensor, axis: int, begin: int, size: int) -> LazyTensor:
    def read(cut: int, ranges: Ranges) -> Tensor:
        if cut == axis:
            return tensor.read(axis, tuple((begin + start, begin + stop) for start, stop in ranges))
        return SliceSpec(cut, ranges).take(tensor.read(axis, ((begin, begin + size),)))

    return LazyTensor((*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]), read)


def _split(tensor: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    axis = dim % tensor.ndim
    total = tensor.shape[axis]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - begin) for begin in range(0, total, sizes)]
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(_narrow(tensor, axis, begin, size) for begin, size in zip(begins, sizes, strict=True))


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    one, two = dim0 % tensor.ndim, dim1 % tensor.ndim
    swap = {one: two, two: one}
    shape = [tensor.shape[swap.get(dim, dim)] for dim in range(tensor.ndim)]
    return LazyTensor(shape, lambda cut, ranges: tensor.read(swap.get(cut, cut), ranges).transpose(one, two))


TRACED: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _concatenate,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.transpose: _transpose,
}
