"""Files that are either whole or not there."""

import os
import uuid
from pathlib import Path


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it, so that no reader ever sees half of it.

    Folders that are missing are made.

    Raises
    ------
    OSError
        If the file cannot be written; what stood at ``path`` before is then untouched.
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
