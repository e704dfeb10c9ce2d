"""The header of a GGUF file, or of all parts of a split one: what it says of the model, and where its tensors lie.

Everything is checked against the sizes of the files before a weight is read: nobody knows where they come from.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from megakv.base.errors import MegaKVError

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Types of GGUF that hold a number for each weight."""
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""Name, number and count of a file that llama.cpp has split."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
MOST_DIMENSIONS, ALIGNMENT = 4, 32


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and how its rows are stored."""

    file: Path
    name: str
    shape: tuple[int, ...]
    """As torch has it."""
    kind: str
    offset: int
    """From the beginning of the file."""
    row_bytes: int

    @property
    def rows(self) -> int:
        """Rows of all of it, matrices of several experts one behind the other."""
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """``[rows, row bytes]`` uint8 of some rows, in memory of their own."""
        stop = self.rows if stop is None else stop
        found = torch.empty((stop - start, self.row_bytes), dtype=torch.uint8)
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.offset + start * self.row_bytes)
            memory, done = memoryview(cast(Any, found.numpy().reshape(-1))), 0
            while done < len(memory):
                count = file.readinto(memory[done:])
                if not count:
                    raise MegaKVError(f"{self.file} became shorter while {self.name} was read; start again")
                done += count
        return found


class _Cursor:
    """Reads a mapped file from its beginning; what lies behind its end is a ValueError."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def take(self, form: str) -> Any:
        size = struct.calcsize(f"<{form}")
        if self.at + size > len(self.data):
            raise ValueError("it ends within its header")
        found = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += size
        return found[0] if len(found) == 1 else found

    def text(self) -> str:
        size = self.take("Q")
        if size > len(self.data) - self.at:
            raise ValueError("it ends within its header")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        """A value of the metadata; of long lists of texts, such as vocabularies, their number."""
        if kind in SCALARS:
            return self.take(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"a value has type {kind}, which there is none of")
        inner, count = self.take("IQ")
        if count > len(self.data) - self.at:
            raise ValueError("it ends within its header")
        if inner in SCALARS:
            found = self.take(f"{count}{SCALARS[inner]}")
            return [found] if count == 1 else list(found)
        if inner == TEXT:
            self._skip_texts(count)
        else:
            for _ in range(count):
                self.value(inner)
        return count

    def _skip_texts(self, count: int) -> None:
        """Go past so many texts: a vocabulary has hundreds of thousands, of which none is wanted here."""
        data, at, size_at = self.data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + size_at(data, at)[0]
        if at > len(data):
            raise ValueError("it ends within its header")
        self.at = at


class GgufFile:
    """Metadata and tensors of a GGUF file; of a split one, of all parts, whichever of them is given."""

    def __init__(self, path: Path):
        self.path, self.files = path, _parts(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for number, file in enumerate(self.files):
            metadata, tensors = _read(file)
            count = metadata.get("split.count", 1)
            if count not in (0, 1) and (count != len(self.files) or metadata.get("split.no", number) != number):
                raise MegaKVError(
                    f"model {file} is one of {count} parts of a split GGUF file: give them their names back, "
                    f"NAME-00001-of-{count:05}.gguf and so on, in one folder"
                )
            self.metadata = metadata | self.metadata
            for tensor in tensors:
                if tensor.name in self.tensors:
                    raise MegaKVError(f"{file}: {tensor.name} is stored twice; fetch it again")
                self.tensors[tensor.name] = tensor
        if not any(len(tensor.shape) > 1 for tensor in self.tensors.values()):
            raise MegaKVError(f"model {path} holds no weights: a GGUF file of a whole model is needed")
        if not isinstance(self.metadata.get("general.architecture"), str):
            raise MegaKVError(f"model {path} does not say of what architecture it is (general.architecture)")

    @property
    def architecture(self) -> str:
        """Llama.cpp's name of the model's family."""
        found: str = self.metadata["general.architecture"]
        return found

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes of matrices by the type they are stored in, the most first."""
        found: dict[str, int] = {}
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                found[tensor.kind] = found.get(tensor.kind, 0) + tensor.nbytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def dtype(self) -> torch.dtype:
        """The type to compute in: that of matrices where all have one of numbers, else bfloat16."""
        kinds = list(self.kinds)
        return PLAIN.get(kinds[0], torch.bfloat16) if len(kinds) == 1 else torch.bfloat16


def _parts(path: Path) -> list[Path]:
    """The files of a model, in order."""
    part = PART.fullmatch(path.name)
    if part is None or int(part[3]) < 2:
        return [path]
    name, count = part[1], int(part[3])
    files = [path.with_name(f"{name}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise MegaKVError(
            f"model {path} is one of {count} parts of a split GGUF file, and {', '.join(missing[:3])} "
            f"{'lies' if len(missing) == 1 else 'lie'} not beside it; fetch all of them into one folder"
        )
    return files


def _read(path: Path) -> tuple[dict[str, Any], list[StoredTensor]]:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(path, _Cursor(data))
    except (ValueError, struct.error, OverflowError, RecursionError) as error:
        # An empty file cannot be mapped, and texts may be of any bytes.
        raise MegaKVError(f"model {path} is cut short or no GGUF file ({error}); fetch it again") from error
    except OSError as error:
        raise MegaKVError(f"model {path} cannot be read: {error.strerror or error}") from error


def _header(path: Path, cursor: _Cursor) -> tuple[dict[str, Any], list[StoredTensor]]:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    _, version, count, keys = cursor.take("IIQQ")
    if version not in (2, 3):
        raise ValueError(f"it is of version {version}, expected 2 or 3, in little-endian order")
    metadata = {}
    for _ in range(keys):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.take("I"))
    found = []
    for _ in range(count):
        name, dimensions = cursor.text(), cursor.take("I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        sizes = [cursor.take("Q") for _ in range(dimensions)]
        found.append((name, tuple(reversed(sizes)), *cursor.take("IQ")))
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its tensors begin at multiples of {alignment!r} bytes")
    start = -(-cursor.at // alignment) * alignment
    tensors = [_placed(path, name, shape, kind, start + offset) for name, shape, kind, offset in found]
    end = start
    for tensor in sorted(tensors, key=lambda each: each.offset):
        if tensor.offset < end:
            raise ValueError(f"{tensor.name} begins within another tensor")
        end = tensor.offset + tensor.nbytes
        if end > len(cursor.data):
            raise ValueError(f"{tensor.name} ends {end - len(cursor.data)} bytes behind it")
    return metadata, tensors


def _placed(path: Path, name: str, shape: tuple[int, ...], number: int, offset: int) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ValueError(f"{name} has type {number}, which is none of GGUF's") from None
    elements, nbytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % elements:
        raise ValueError(f"{name} has rows of {shape[-1]} weights, no whole blocks of {kind.name} of {elements}")
    return StoredTensor(path, name, shape, kind.name, offset, shape[-1] // elements * nbytes)


def unpacked(tensor: StoredTensor, rows: Tensor) -> Tensor:
    """Numbers ``[rows, columns]`` of stored rows of any type; float32 where they are quantised.

    Raises
    ------
    MegaKVError
        If nobody here knows how to unpack the type.
    """
    from gguf import GGMLQuantizationType, quants

    from megakv.weights.blocks import BLOCKS, unpack

    if tensor.kind in PLAIN:
        return rows.view(PLAIN[tensor.kind])
    if tensor.kind in BLOCKS:
        return unpack(rows, tensor.kind)
    try:
        values = quants.dequantize(rows.numpy(), GGMLQuantizationType[tensor.kind])
    except NotImplementedError as error:
        raise MegaKVError(
            f"{tensor.file}: {tensor.name} has type {tensor.kind}, which cannot be unpacked; take a file with "
            f"{', '.join(BLOCKS)}"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
