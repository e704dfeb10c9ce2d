"""The folder of a saved session, where one rename takes the place of the last save.

``session.json`` names the subfolder in which everything else of a save lies. A new save is written to a subfolder of
its own, and a new ``session.json`` then renamed over the old one: before that moment the folder holds the old session,
from then on the new one. While a save is under way its rank 0 holds the lock of a file in its subfolder. The kernel
drops the lock of a process that is killed, so whoever comes next can tell what was left behind from what is at work.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from megakv.base.errors import MegaKVError
from megakv.base.tensor_files import sync, written_whole

META_FILE = "session.json"
SUBFOLDER = re.compile(r"save-[0-9a-f]{16}")
LOCK_FILE = "lock"
DATA_FILE = re.compile(r"(session\.json|lock|(tokens|cp\d{5,}_tp\d{5,})\.safetensors)(\.new)?")
"""Files of a save, of earlier formats too: in format 1 those with tensors lay beside `META_FILE`."""


def shard_file(cp_rank: int, tp_rank: int) -> str:
    """Name of one rank's file."""
    return f"cp{cp_rank:05d}_tp{tp_rank:05d}.safetensors"


def read_values(folder: Path) -> dict[str, Any]:
    """What `META_FILE` holds; a MegaKVError if it is missing, broken, or not of a session."""
    path = folder / META_FILE
    try:
        values: Any = json.loads(path.read_text())
    except OSError as error:
        raise MegaKVError(f"{folder} is no saved session: {META_FILE} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise MegaKVError(f"{path} is broken: {error}") from error
    if not isinstance(values, dict) or not {"format", "model", "length"} <= values.keys():
        raise MegaKVError(f"{path} is broken: it describes no session")
    data = values.get("data", "")
    if data and not (isinstance(data, str) and SUBFOLDER.fullmatch(data)):
        raise MegaKVError(f"{path} is broken: data = {data!r} is no subfolder of a session")
    return values


class PendingSave:
    """A save under way, for the rank that leads it: `data` is the new subfolder, for all ranks' files.

    The last save in the target folder stays whole until `commit`. A folder that holds something else, or cannot be made
    or written to, is a ValueError; a link to a folder is followed.
    """

    def __init__(self, target: str | Path):
        self._target = Path(os.path.abspath(target))
        self._committed = False
        _check(self._target)
        self._made = [folder for folder in (self._target, *self._target.parents) if not folder.exists()]
        try:
            self._target.mkdir(parents=True, exist_ok=True)
            # Before the new one takes its room.
            _remove_leftovers(self._target)
            self.data, self._lock = _begin(self._target)
        except OSError as error:
            self._unmake()
            raise ValueError(f"no session can be saved to {self._target}: {error.strerror}") from error

    def commit(self, values: Mapping[str, Any]) -> None:
        """Let the new save, whose files are complete, be the session of the folder; `values` are for `META_FILE`.

        Where they cannot be written, which is a MegaKVError, the folder is as it was.
        """
        new = self.data / META_FILE
        try:
            with written_whole(new) as file:
                file.write(json.dumps({**values, "data": self.data.name}, indent=2).encode())
            new.replace(self._target / META_FILE)
            self._committed = True
            for folder in (self._target, *(made.parent for made in self._made)):
                sync(folder)
        except OSError as error:
            raise unwritable(self._target, error) from error

    def close(self) -> None:
        """Remove what is not the folder's session: this save if it failed, others that it or a later one replaced."""
        (self.data / LOCK_FILE).unlink(missing_ok=True)
        os.close(self._lock)
        with suppress(OSError, MegaKVError):
            _remove_leftovers(self._target)
        if not self._committed:
            self._unmake()

    def _unmake(self) -> None:
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()


def unwritable(folder: Path, error: OSError) -> MegaKVError:
    """What to say of a save that the disk did not take."""
    return MegaKVError(f"the session cannot be saved to {folder}: {error.strerror}; an earlier one there stays whole")


def _check(target: Path) -> None:
    """Refuse a folder that is not for sessions."""
    if target.is_symlink() and not target.exists():
        raise ValueError(
            f"no session can be saved to {target}: it is a link to {os.readlink(target)}, which is missing"
        )
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"no session can be saved to {target}: it is a file; name a folder")
    try:
        names = os.listdir(target)
        if META_FILE in names:
            read_values(target)
    except (MegaKVError, OSError) as error:
        raise ValueError(f"{target} exists and is no saved session ({error}); choose another folder") from error
    foreign = [name for name in names if not SUBFOLDER.fullmatch(name)]
    if META_FILE not in names and foreign:
        raise ValueError(f"{target} exists and is no saved session (it holds {foreign[0]!r}); choose another folder")


def _begin(target: Path) -> tuple[Path, int]:
    """A new subfolder, and the descriptor that holds the lock in it."""
    while True:
        data = target / f"save-{secrets.token_hex(8)}"
        data.mkdir()
        # Another save may be faster, and take for left over what has no lock yet.
        with suppress(FileNotFoundError, FileExistsError):
            lock = os.open(data / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            if _lock(lock) is not False and os.fstat(lock).st_nlink:
                return data, lock
            os.close(lock)


def _lock(file: int) -> bool | None:
    """Whether a file could be locked, which another save may have done; None on a file system without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_leftovers(target: Path) -> None:
    """Remove what belongs to no save: neither the folder's session nor one that is under way elsewhere."""
    for name in filter(SUBFOLDER.fullmatch, os.listdir(target)):
        if name == _present(target):
            continue
        path = target / name / LOCK_FILE
        with suppress(OSError), ExitStack() as held:
            # A complete save has none, and one that has just begun: whoever makes it has the subfolder.
            new = 0 if path.exists() else os.O_CREAT | os.O_EXCL
            held.callback(os.close, lock := os.open(path, os.O_RDWR | os.O_CLOEXEC | new, 0o666))
            locked = _lock(lock)
            if locked or (new and locked is None):
                if name == _present(target):
                    path.unlink()
                else:
                    _remove(target / name)
    if _present(target):
        for name in os.listdir(target):
            if name.endswith(".safetensors") and DATA_FILE.fullmatch(name):
                (target / name).unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Remove a subfolder of which nothing comes any more, but nothing that somebody else put there."""
    for file in os.listdir(folder):
        if DATA_FILE.fullmatch(file):
            (folder / file).unlink(missing_ok=True)
    folder.rmdir()


def _present(target: Path) -> str:
    """The subfolder of the folder's session; empty where it has none."""
    return str(read_values(target).get("data", "")) if (target / META_FILE).exists() else ""
