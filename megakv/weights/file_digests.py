"""Digests of a checkpoint's files: all bytes, read once for a host, kept for later starts."""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME
from xxhash import xxh3_128

from megakv.base.errors import MegaKVError
from megakv.base.tensor_files import written_whole
from megakv.distributed.agreement import Agreement

logger = logging.getLogger(__name__)

CACHE = Path(HF_HOME) / "megakv"
KEPT = "digests.json"
MOST_KEPT = 1024
"""Files whose digests are kept, the latest: some 100 KB."""
SETTLED_S = 2.0
"""Age from which another write to a file shows in its times."""
DIGEST = re.compile(r"[0-9a-f]{32}")
WINDOW = 64 << 20
"""Bytes that are mapped at a time: pages of a mapped file count as memory of the process."""


def file_digest(path: Path, stop: threading.Event | None = None) -> str:
    """A 128-bit hash of a file's bytes, as hexadecimal digits; a `MegaKVError` once `stop` is set."""
    hasher = xxh3_128()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start in range(0, size, WINDOW):
            if stop is not None and stop.is_set():
                raise MegaKVError(f"{path} was not read to its end: the start was given up")
            with mmap.mmap(file.fileno(), min(WINDOW, size - start), access=mmap.ACCESS_READ, offset=start) as part:
                part.madvise(mmap.MADV_WILLNEED)
                hasher.update(part)
    return hasher.hexdigest()


def state_of(path: Path) -> str:
    """Device, inode, size and times of a file, links followed: where they are the same, its bytes are."""
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


def _is_still(path: Path, state: str) -> bool:
    try:
        return state_of(path) == state
    except OSError:
        return False


class KeptDigests:
    """Digests of files by their `state_of`, in a JSON of the user's cache folder.

    A JSON that is missing, broken or not to be written costs time alone: the files are read again.
    """

    def __init__(self, folder: Path = CACHE):
        self._path = folder / KEPT

    def of(self, paths: Sequence[Path], stop: threading.Event | None = None) -> dict[str, str]:
        """Digests by the states in which the files were read; a `MegaKVError` if one cannot be read, or by `stop`."""
        known, found, new = self._known(), dict[str, str](), dict[str, str]()
        for path in paths:
            try:
                state = state_of(path)
                if (digest := known.get(state)) is None:
                    digest = file_digest(path, stop)
                    # A file that is written to meanwhile is read again by whoever comes next, and so is one that is as
                    # young as the clock of its file system is coarse.
                    settled = time.time() - path.stat().st_mtime > SETTLED_S
                    new |= {state: digest} if settled and state_of(path) == state else {}
            except OSError as error:
                raise MegaKVError(f"{path} cannot be read: {error.strerror or error}") from error
            found[state] = digest
        if new:
            # Other ranks have kept theirs meanwhile: reading may take minutes.
            self._keep(self._known() | new)
        return found

    def _known(self) -> dict[str, str]:
        """All that is kept, the oldest first."""
        try:
            values: Any = json.loads(self._path.read_text())
            files = dict(values["files"])
            whole = values["check"] == _check(files) and all(map(DIGEST.fullmatch, files.values()))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}
        return files if whole else {}

    def _keep(self, files: Mapping[str, str]) -> None:
        """Of processes that write at once the last one's are kept: the others may have to read their files again."""
        files = dict([*files.items()][-MOST_KEPT:])
        own = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(own) as file:
                file.write(json.dumps({"check": _check(files), "files": files}).encode())
            own.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                own.unlink()
            logger.info("digests of files are not kept in %s: %s", self._path, error.strerror or error)


def _check(files: Mapping[str, str]) -> str:
    return xxh3_128(json.dumps(files, sort_keys=True).encode()).hexdigest()


class FileDigests:
    """Digests of a checkpoint's files, which are read in a thread beside the loading. Every rank makes one.

    The files of a host are divided among its ranks, whatever folders these were given.
    """

    def __init__(self, files: Mapping[str, Path], agreement: Agreement):
        self._agreement, self._stop, self._host = agreement, threading.Event(), socket.gethostname()
        comm, self._files = agreement.comm, files
        states = agreement.together(lambda: {name: state_of(path) for name, path in files.items()})
        self._wanted = {name: (self._host, state) for name, state in states.items()}
        own = _share(comm.gather_objects(self._wanted), comm.mesh.rank)
        paths = [files[name] for name, wanted in self._wanted.items() if wanted in own]
        self._reader = ThreadPoolExecutor(1, "megakv-digests")
        self._found = self._reader.submit(KeptDigests().of, paths, self._stop)
        # The thread ends with its work.
        self._reader.shutdown(wait=False)

    def gather(self) -> dict[str, str]:
        """The digests of this rank's files, by name, when they have been loaded. Every rank must call it."""
        found = self._agreement.together(self._found.result)
        gathered = self._agreement.comm.gather_objects({(self._host, state): found[state] for state in found})
        known = {wanted: digest for each in gathered for wanted, digest in each.items()}

        def own() -> dict[str, str]:
            for name, wanted in self._wanted.items():
                # What was loaded may else be newer than what was read for the digest.
                if wanted not in known or not _is_still(self._files[name], wanted[1]):
                    raise MegaKVError(f"{name} was written to while the model was loaded; start again")
            return {name: known[wanted] for name, wanted in self._wanted.items()}

        return self._agreement.together(own)

    def close(self) -> None:
        """End the reading, wherever it is."""
        self._stop.set()
        self._reader.shutdown()


def _share(everywhere: Sequence[Mapping[str, tuple[str, str]]], rank: int) -> set[tuple[str, str]]:
    """The files that a rank reads: each falls to one of those that have it, in turn."""
    holders: dict[tuple[str, str], list[int]] = {}
    for holder, wanted in enumerate(everywhere):
        for each in wanted.values():
            holders.setdefault(each, []).append(holder)
    return {each for index, (each, ranks) in enumerate(holders.items()) if ranks[index % len(ranks)] == rank}
