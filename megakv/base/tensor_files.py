"""Safetensors files: written in pieces, read back where they may be missing or broken, which is a `MegaKVError`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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
        heads, _, width = runs[0].shape
        shape = heads, sum(run.shape[1] for run in runs), width
        return cls(shape, runs[0].dtype, lambda: (run[head] for head in range(heads) for run in runs))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write, put in the place of one that may be there when it is complete and on the disk; or not at all."""
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_tensors(path: Path, tensors: Mapping[str, StreamedTensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file by `written_whole`; an OSError says that the disk does not take it."""
    # The widest types first: a reader wants each tensor at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        first, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": (first, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with written_whole(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in ordered:
            written = 0
            for piece in tensor.pieces():
                assert piece.dtype == tensor.dtype
                # Of one element any stride passes for contiguous.
                flat = piece.cpu().contiguous().as_strided((piece.numel(),), (1,))
                written += file.write(flat.view(torch.uint8).numpy().data)
            assert written == tensor.nbytes, f"{name} has {tensor.nbytes} bytes, its pieces {written}"


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_metadata(path: Path) -> dict[str, str]:
    """What a file says of itself."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def read_tensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Tensors of a file, by name, in memory that is mapped from it."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in names}


def check_types(path: Path, dtype: torch.dtype | None = None) -> None:
    """Refuse a file whose keys and values are of another type, or of several, or whose coordinates are no integers."""
    with _opened(path) as file:
        found = {name: file.get_slice(name).get_dtype() for name in file.keys()}
    rows = {name for name in found if name.endswith((".k", ".v"))}
    if dtype is None:
        kinds = {found[name] for name in rows}
        dtype = next((k for k, name in DTYPES.items() if k.is_floating_point and name in kinds), torch.float32)
    whole = torch.promote_types(dtype, torch.float32)
    for name, kind in found.items():
        expected = DTYPES[dtype if name in rows else whole if name.endswith(WHOLE) else torch.int64]
        if kind != expected:
            raise MegaKVError(f"{path} is broken: {name} is {kind}, not {expected}")


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
