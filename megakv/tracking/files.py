"""Files that are either whole or not there."""

from __future__ import annotations

import io
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it, so that no reader ever sees half of it.

    Folders that are missing are made.

    Raises OSError if the file cannot be written; what stood at ``path`` before is then untouched.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: a rename is atomic only inside one file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_picture(path: str | Path, figure: Figure) -> None:
    """Write a figure as a PNG, in its own size."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi="figure")
    write_whole(path, buffer.getvalue())
