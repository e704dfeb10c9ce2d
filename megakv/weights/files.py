"""The safetensors files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megakv.errors import MegaKVError
from megakv.placement.slices import Ranges
from megakv.weights.lazy import LazyTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
ADVICE = (
    "convert it once with a trusted machine's `AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)`, which "
    "writes safetensors"
)


def local_directory(model: str | Path) -> Path:
    """The directory of a model: itself, or its copy in the hub's cache.

    Raises
    ------
    MegaKVError
        If there is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    name = str(model)
    if path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise MegaKVError(f"model {name!r} is no directory; give a directory with config.json, or a hub id")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]))
    except Exception as error:  # the hub's client raises a dozen unrelated types, httpx's among them
        raise MegaKVError(
            f"model {name!r} is no directory here, and the hub gave none: {type(error).__name__}: {error}"
        ) from error


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


class StoredTensors:
    """All tensors of a checkpoint directory, open for reading by parts.

    Parameters
    ----------
    directory : Path

    Raises
    ------
    MegaKVError
        If a file is missing, cut short or not safetensors, or a key is not where the index says.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.bytes_read = 0
        self._files: dict[str, Any] = {}
        weight_map = _weight_map(directory)
        for name in [SINGLE] if weight_map is None else sorted(set(weight_map.values())):
            try:
                self._files[name] = safe_open(directory / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise MegaKVError(f"{directory / name} is cut short or broken ({error}); fetch it again") from error
        held = {name: set(file.keys()) for name, file in self._files.items()}
        if weight_map is None:
            weight_map = dict.fromkeys(held[SINGLE], SINGLE)
        self.file_of = weight_map
        for key, name in weight_map.items():
            if key not in held[name]:
                raise MegaKVError(f"{directory / name} lacks {key}, which {INDEX} places there; fetch it again")

    def open(self, key: str) -> LazyTensor:
        """The tensor stored under `key`.

        Raises
        ------
        MegaKVError
            If it is not of a floating-point type that transformers computes in.
        """
        part = self._files[self.file_of[key]].get_slice(key)
        if part.get_dtype() not in FLOATS:
            raise MegaKVError(
                f"{self.directory / self.file_of[key]}: {key} has type {part.get_dtype()}, expected one of "
                f"{', '.join(FLOATS)}; quantised weights are not supported"
            )

        def read(dim: int, ranges: Ranges) -> Tensor:
            if not part.get_shape():
                return self._files[self.file_of[key]].get_tensor(key)
            lead = (slice(None),) * dim
            found = [part[(*lead, slice(start, stop))] for start, stop in ranges]
            self.bytes_read += sum(piece.nbytes for piece in found)
            return found[0] if len(found) == 1 else torch.cat(found, dim=dim)

        return LazyTensor(part.get_shape(), read)
