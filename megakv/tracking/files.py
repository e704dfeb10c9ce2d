"""Files that are either whole or not there, and pictures in one style."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, PALE = "#22282f", "#8a929b", "#dde1e6"
BLUE, ORANGE, RED, GREEN = "#2f6db3", "#f2b872", "#b3261e", "#3b8f5f"
STYLE: Any = {
    "figure.facecolor": "white", "font.size": 8, "text.color": INK, "text.parse_math": False,
    "axes.labelcolor": INK, "axes.labelsize": 9, "axes.titlecolor": INK, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "grid.color": PALE, "grid.linewidth": 0.5,
    "xtick.color": INK, "ytick.color": INK, "legend.frameon": False, "legend.labelcolor": INK,
}  # fmt: skip


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


def write_picture(target: str | Path | io.BytesIO, figure: Figure) -> None:
    """Write a figure as a PNG, in its own size, to a file or into memory."""
    buffer = target if isinstance(target, io.BytesIO) else io.BytesIO()
    figure.savefig(buffer, format="png", dpi="figure")
    if not isinstance(target, io.BytesIO):
        write_whole(target, buffer.getvalue())


@contextmanager
def picture(target: str | Path | io.BytesIO, **options: Any) -> Iterator[Figure]:
    """A figure with these options to draw on; at the end it is written as a PNG."""
    # Only rank 0 draws, once; importing matplotlib on every rank costs each of them half a second.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(**options)
        yield figure
        write_picture(target, figure)


def drawn(draw: Callable[[io.BytesIO], None]) -> bytes:
    """The PNG that a function draws."""
    draw(buffer := io.BytesIO())
    return buffer.getvalue()
