"""Cells of a benchmark that are kept as they are measured: a run that ends early goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megakv.tracking.files import write_whole


class Parts:
    """A folder with a file for every cell."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.folder = folder
        self.identity = json.loads(json.dumps(identity))

    def path(self, name: str) -> Path:
        """The file of a cell."""
        return self.folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """A cell; None if there is none of this identity."""
        try:
            found: dict[str, Any] = json.loads(self.path(name).read_text())
        except (OSError, ValueError):
            return None
        return found["part"] if found.get("identity") == self.identity else None

    def write(self, name: str, part: Mapping[str, Any]) -> None:
        """Keep a cell, whole or not at all."""
        text = json.dumps({"identity": self.identity, "part": part}, indent=1, allow_nan=False)
        write_whole(self.path(name), (text + "\n").encode())

    def names(self, prefix: str = "") -> list[str]:
        """Cells of this identity, in the order of their names."""
        found = sorted(path.stem for path in self.folder.glob(f"{prefix}*.json"))
        return [name for name in found if self.read(name) is not None]
