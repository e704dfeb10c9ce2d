"""Files that are either whole or not there, and pictures in one style."""

from __future__ import annotations

import errno
import io
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
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


def check_outputs(
    paths: Mapping[str, str | Path | None], inputs: Mapping[str, str | None] | None = None, *, make_folders: bool = True
) -> None:
    """Refuse, before work starts, files that could not be written at its end.

    paths, inputs: by setting, files to write, and files that are read and must stay; None where there is none.
    make_folders: make folders that are missing, as `write_whole` does; otherwise they are refused.

    Raises ValueError with the setting and the path as it was given. What stands at the paths stays.
    """
    taken = {Path(path).resolve(): setting for setting, path in (inputs or {}).items() if path is not None}
    for setting, path in paths.items():
        if path is None:
            continue
        other = taken.setdefault(Path(path).resolve(), setting)
        if other != setting:
            raise ValueError(f"{setting} {path} is the file of {other}: name another one")
        try:
            _check_output(str(path), make_folders)
        except OSError as error:
            raise ValueError(
                f"{setting} {path or repr(path)}: cannot be written: {error.strerror}; name a file in a folder that "
                "this user can write to"
            ) from error


def _check_output(given: str, make_folder: bool) -> None:
    path = Path(given)
    if given.endswith(os.sep) or path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        # A device or a pipe would be replaced.
        raise FileExistsError(errno.EEXIST, "there is something that is no file")
    if make_folder and not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    # Rights alone do not tell: a disk may be full or read-only, a name too long.
    temporary = _beside(path)
    try:
        _write(temporary, b"\n")
    finally:
        temporary.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """A temporary name, of a link beside its end: a rename is atomic only inside one file system."""
    path = path.resolve()
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        # Some file systems say only now that there is no room.
        os.fsync(file.fileno())


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it, so that no reader ever sees half of it.

    Folders that are missing are made. Links are followed, as by `open`: as /dev/stdout, where a file is behind it.

    Raises OSError with the path if the file cannot be written; what stood there before is then untouched.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(path)
        try:
            _write(temporary, content)
            os.replace(temporary, path.resolve())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def picture(target: str | Path | io.BytesIO, **options: Any) -> Iterator[Figure]:
    """A figure with these options to draw on; at the end it is written as a PNG, to a file or into memory."""
    # Only rank 0 draws, once; importing matplotlib on every rank costs each of them half a second.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(**options)
        yield figure
        buffer = target if isinstance(target, io.BytesIO) else io.BytesIO()
        figure.savefig(buffer, format="png", dpi="figure")
        if not isinstance(target, io.BytesIO):
            write_whole(target, buffer.getvalue())


def drawn(draw: Callable[[io.BytesIO], None]) -> bytes:
    """The PNG that a function draws."""
    draw(buffer := io.BytesIO())
    return buffer.getvalue()
