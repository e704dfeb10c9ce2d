"""Reading tensors back from safetensors files that may be missing or broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megakv.errors import MegaKVError


def read_tensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Tensors of a file, by name.

    Raises
    ------
    MegaKVError
        If the file is missing or broken, or lacks one.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in names}


def read_where_present(files: list[Path], names: list[str]) -> Iterator[dict[str, Tensor]]:
    """The named tensors of every file that has the first of them.

    Raises
    ------
    MegaKVError
        If a file is missing or broken, or has only some.
    """
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
        raise MegaKVError(f"the saved session lacks {path}") from error
    except (SafetensorError, OSError) as error:
        raise MegaKVError(f"{path} is truncated or broken: {error}") from error
