"""Safetensors files: written in pieces, read back where they may be missing or broken, which is a `MegaKVError`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megakv.base.errors import MegaKVError

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
"""What the format calls the types that are written."""


WHOLE = (".mass", ".queries")
"""Ends of the names of what is in float32 at least."""


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor for a file, of which no more than one piece need be in host memory at a time.

    `pieces` gives its elements, in the order of its memory, as tensors on any device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, tensor: Tensor) -> StreamedTensor:
        """One that is there: ``[K, n, D]`` goes head by head."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.unbind if tensor.dim() > 2 else lambda: (tensor,))

    @classmethod
    def joined(cls, runs: Sequence[Tensor]) -> StreamedTensor:
        """One ``[K, n, D]`` whose rows lie in several such."""
        stacked = cls.stacked([runs])
        return replace(stacked, shape=stacked.shape[1:])

    @classmethod
    def stacked(cls, blocks: Sequence[Sequence[Tensor]]) -> StreamedTensor:
        """One ``[N, K, n, D]`` of blocks ``[K, n, D]`` whose rows lie in several such."""
        heads, _, width = blocks[0][0].shape
        shape = len(blocks), heads, sum(run.shape[1] for run in blocks[0]), width

        def pieces() -> Iterator[Tensor]:
            return (run[head] for runs in blocks for head in range(heads) for run in runs)

        return cls(shape, blocks[0][0].dtype, pieces)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, StreamedTensor]) -> None:
    """Write a new file, down to the disk; an OSError if it exists, or the disk does not take it."""
    # The widest types first: a reader wants each tensor at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header, end = {}, 0
    for name, tensor in ordered:
        first, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": (first, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in ordered:
            written = 0
            for piece in tensor.pieces():
                assert piece.dtype == tensor.dtype
                # Of one element any stride passes for contiguous.
                flat = piece.cpu().contiguous().as_strided((piece.numel(),), (1,))
                written += file.write(flat.view(torch.uint8).numpy().data)
            assert written == tensor.nbytes, f"{name} has {tensor.nbytes} bytes, its pieces {written}"
        file.flush()
        os.fsync(file.fileno())


def write_in_place(path: Path, tensors: Mapping[str, StreamedTensor]) -> None:
    """Write a file in the place of one that may be there, whole or not at all, with errors as of `write_tensors`."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        write_tensors(new, tensors)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Let the disk know a folder's names."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tensor_kinds(path: Path) -> dict[str, str]:
    """The types of a file's tensors, by name, as the format calls them."""
    with _opened(path) as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}


def read_tensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Tensors of a file, by name, in memory that is mapped from it."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in names}


def check_types(path: Path, dtype: torch.dtype) -> None:
    """Refuse a file whose keys and values are of another type, or whose coordinates are no integers."""
    whole = torch.promote_types(dtype, torch.float32)
    with _opened(path) as file:
        for name in file.keys():
            kind = dtype if name.endswith((".k", ".v")) else whole if name.endswith(WHOLE) else torch.int64
            expected, found = DTYPES[kind], file.get_slice(name)
            if found.get_dtype() != expected:
                raise MegaKVError(f"{path} is broken: {name} is {found.get_dtype()}, not {expected}")


def read_where_present(files: Sequence[Path], names: list[str]) -> Iterator[dict[str, Tensor]]:
    """The named tensors of every file that has the first of them."""
    for path in files:
        with _opened(path) as file:
            found = {name: file.get_tensor(name) for name in names} if names[0] in set(file.keys()) else None
        if found is not None:
            yield found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise MegaKVError(f"{path} is missing") from error
    except MegaKVError:
        raise
    # The latter of shapes that no tensor can have.
    except (SafetensorError, OSError, RuntimeError, TypeError, OverflowError) as error:
        raise MegaKVError(f"{path} is truncated or broken: {error}") from error
