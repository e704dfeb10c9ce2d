"""The safetensors files of a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megakv.base.errors import MegaKVError
from megakv.weights.gguf import gguf_of
from megakv.weights.lazy import LazyTensor
from megakv.weights.placement.slices import Ranges

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Pages of a mapped file count as this process's memory until the file is closed.
MAPPED_BYTES = 64 << 20
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED_TYPES = FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of tensors that quantised weights consist of."""
ADVICE = (
    "convert it once with a trusted machine's `AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`, which "
    "writes safetensors"
)


def weight_files(directory: Path) -> dict[str, Path]:
    """The files that decide a checkpoint's weights, by name; none where `StoredTensors` says what is wrong with it."""
    with suppress(MegaKVError):
        if (source := gguf_of(directory)) is not None:
            from megakv.weights.gguf_file import GgufFile

            return {path.name: path for path in GgufFile(source).files}
        found = _weight_map(directory)
        names = [SINGLE] if found is None else [INDEX, *sorted(set(found.values()))]
        return {name: directory / name for name in names if (directory / name).is_file()}
    return {}


def _weight_map(directory: Path) -> dict[str, str] | None:
    """From stored key to file name, as the index says; None when a single file holds all."""
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        return None
    if not index.is_file():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        if pickles:
            raise MegaKVError(
                f"{directory} holds only pickled weights ({pickles[0]}), which can run any code when read; {ADVICE}"
            )
        raise MegaKVError(f"{directory} has neither {SINGLE} nor {INDEX}; config megakv.load = 'random' needs none")
    try:
        found: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise MegaKVError(f"{index} is no index of a checkpoint: {error!r}; fetch it again") from error
    missing = sorted({name for name in found.values() if not (directory / name).is_file()})
    if missing:
        raise MegaKVError(f"{directory} lacks {', '.join(missing)}, which {INDEX} names; fetch it again")
    return found


def stored_dtype(directory: Path) -> torch.dtype | None:
    """The type of the first weights of a checkpoint, which are taken for all as transformers takes them; None where a
    folder has none that can be read.
    """
    index = directory / INDEX
    try:
        name = SINGLE
        if not (directory / SINGLE).is_file():
            name = min(json.loads(index.read_text())["weight_map"].values())
        with safe_open(directory / name, framework="pt") as file:
            kinds = (file.get_slice(key).get_dtype() for key in file.keys())  # noqa: SIM118
            return next((FLOATS[kind] for kind in kinds if kind in FLOATS), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        # Whoever reads the weights says what is wrong with them.
        return None


class StoredTensors:
    """All tensors of a checkpoint directory, or of a `single` file there, to be read by parts.

    Files are mapped, and closed again whenever `MAPPED_BYTES` of them have been touched.
    """

    def __init__(self, directory: Path, types: Mapping[str, torch.dtype] = FLOATS, *, single: str | None = None):
        self.directory = directory
        self.bytes_read = 0
        self._types = types
        self._open: dict[str, Any] = {}
        self._touched = 0
        weight_map = None if single else _weight_map(directory)
        names = [single or SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        held = {name: set(self._file(name).keys()) for name in names}
        if weight_map is None:
            weight_map = dict.fromkeys(held[names[0]], names[0])
        self.file_of = weight_map
        for key, name in weight_map.items():
            if key not in held[name]:
                raise MegaKVError(f"{directory / name} lacks {key}, which {INDEX} places there; fetch it again")

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.directory / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise MegaKVError(
                    f"{self.directory / name} is cut short or broken ({error}); fetch it again"
                ) from error
        return self._open[name]

    def open(self, key: str) -> LazyTensor:
        """The tensor stored under `key`."""
        return self.open_in(key, self.file_of[key])

    def open_in(self, key: str, name: str) -> LazyTensor:
        """The tensor stored under `key` in a file."""
        stored = self._file(name).get_slice(key)
        shape, kind = stored.get_shape(), stored.get_dtype()
        if kind not in self._types:
            raise MegaKVError(
                f"{self.directory / name}: {key} has type {kind}, expected one of {', '.join(self._types)}; quantised "
                "weights need a quantization_config in config.json"
            )

        def read(dim: int, ranges: Ranges) -> Tensor:
            if self._touched > MAPPED_BYTES:
                self._open.clear()
                self._touched = 0
            if not shape:
                return self._file(name).get_tensor(key)
            part = self._file(name).get_slice(key)
            found = [part[(*(slice(None),) * dim, slice(start, stop))] for start, stop in ranges]
            size = sum(piece.nbytes for piece in found)
            self.bytes_read += size
            self._touched += size if dim == 0 else math.prod(shape) * found[0].itemsize
            return found[0] if len(found) == 1 else torch.cat(found, dim=dim)

        return LazyTensor(shape, read)
