"""Prefixes on disk: a file of keys and values per rank, and one that says whose they are; written beside the passes.

A record of rank 0 makes a prefix count, and is written last: what a kill leaves half-written is removed at the next
start. Files are of one model, weights and tensor-parallel degree, in a folder of theirs; of any context-parallel one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from megakv.base.errors import MegaKVError
from megakv.base.json_files import read_json
from megakv.base.tensor_files import written_whole
from megakv.cache.saved_tokens import FORMAT, check_format
from megakv.cache.span import CacheSpan
from megakv.distributed.comm import Communicator
from megakv.serving.plan import StoredPart
from megakv.serving.prefix_node import FoundPrefix, Tokens

logger = logging.getLogger(__name__)

KEY = re.compile(r"[0-9a-f]{24}")
NAME = re.compile(r"([0-9a-f]{24})(\.\d+-\d+\.safetensors|\.json)(\.new)?")
MOST_RANKS = 1 << 16
MOST_RECORD_BYTES = 1 << 26
MOST_WAITING = 1 << 30
"""Bytes of this rank that may wait to be written; what comes then is written once it is used again."""
READERS = 2


@dataclass(frozen=True)
class PrefixRecord:
    """What is said of a file: its `tokens` come behind the first `at` ones of the file `parent`, if it has one."""

    tokens: tuple[int, ...]
    parent: str | None
    at: int
    cp: int
    format: int = FORMAT

    def __post_init__(self) -> None:
        counts = (self.at, self.cp, *self.tokens)
        whole = all(type(count) is int and 0 <= count < 1 << 31 for count in counts)
        known = self.parent is None or (isinstance(self.parent, str) and KEY.fullmatch(self.parent) is not None)
        if not (whole and known and self.tokens and 0 < self.cp <= MOST_RANKS and self.format == FORMAT):
            raise ValueError("it describes no kept prefix")


class PrefixFolder:
    """One rank's part of a store that all ranks share.

    `identity` is whatever files must have in common to be read: another one has a folder of its own.
    """

    def __init__(self, folder: Path, identity: str, comm: Communicator):
        self._folder = folder / hashlib.sha256(identity.encode()).hexdigest()[:32]
        self._comm = comm
        self._records: dict[str, PrefixRecord] = {}
        self._written: dict[str, Future[None]] = {}
        self._writer = ThreadPoolExecutor(1, "megakv-prefix-writer")
        self._readers = ThreadPoolExecutor(READERS, "megakv-prefix-reader")
        self._waiting_bytes, self._counting = 0, threading.Lock()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"store = {str(folder)!r} cannot be made: {error.strerror}; name a folder") from error
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise ValueError(f"store = {str(folder)!r}: {self._folder} cannot be written to")

    # Writing

    @property
    def room(self) -> int:
        """Bytes of this rank that may come now: none where the disk does not keep up."""
        return MOST_WAITING - self._waiting_bytes

    def describe(self, key: str, tokens: Tokens, behind: StoredPart | None) -> None:
        """Of rank 0: what is to be said of a file once it is written; it comes behind the end of a part of another."""
        parent, at = (None, 0) if behind is None else (behind.key, behind.last)
        self._records[key] = PrefixRecord(tuple(tokens.tolist()), parent, at, self._comm.mesh.cp_size)

    def write(self, key: str, span: CacheSpan) -> None:
        """Begin to write this rank's part."""
        size = span.nbytes()
        self._count(size)
        record = self._records.pop(key, None)

        def save() -> None:
            try:
                span.save(self._path(key, self._comm.mesh.cp_rank))
                if record is not None:
                    with written_whole(self._folder / f"{key}.json") as file:
                        file.write(json.dumps(asdict(record)).encode())
            except Exception as error:
                logger.warning("a prefix is not kept on disk: %s", str(error) or type(error).__name__)
            finally:
                self._count(-size)

        future = self._written[key] = self._writer.submit(save)
        future.add_done_callback(lambda _: self._written.pop(key, None))

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self._waiting_bytes += nbytes

    def erase(self, key: str) -> None:
        """Begin to remove what there is of a key: rank 0 that of all ranks, which may have been others once."""
        self._writer.submit(self._remove, key)

    def _remove(self, key: str) -> None:
        with suppress(OSError):
            if self._comm.mesh.rank == 0:
                # First: without it the others count for nothing.
                (self._folder / f"{key}.json").unlink(missing_ok=True)
                for path in self._folder.glob(f"{key}.*"):
                    path.unlink(missing_ok=True)
            else:
                self._path(key, self._comm.mesh.cp_rank).unlink(missing_ok=True)

    def _path(self, key: str, cp_rank: int) -> Path:
        return self._folder / f"{key}.{cp_rank}-{self._comm.mesh.tp_rank}.safetensors"

    # Reading

    def read(self, part: StoredPart, device: torch.device) -> Future[CacheSpan]:
        """Begin to read what this rank is to have of a part; a MegaKVError if a file is missing or broken."""
        pending = self._written.get(part.key)

        def load() -> CacheSpan:
            if pending is not None:
                pending.result()
            paths = [self._path(part.key, rank) for rank in range(part.cp)]
            span = CacheSpan.load(paths, self._comm.mesh.cp_rank, self._comm.mesh.cp_size, device)
            if len(span) < part.last:
                raise MegaKVError(f"{paths[0]} has {len(span)} tokens, {part.last} were expected")
            begin = span.first
            if part.last < len(span):
                span = span.split(begin + part.last)[0]
            return span.split(begin + part.first)[1] if part.first else span

        return self._readers.submit(load)

    def found(self) -> list[FoundPrefix]:
        """Of rank 0, before anything is written: whole prefixes, parents first; what is left of others is removed."""
        names = {name for name in os.listdir(self._folder) if NAME.fullmatch(name)}
        whole: dict[str, FoundPrefix] = {}
        for name in sorted(names):
            if name.endswith(".json") and (prefix := self._look_at(name[:24], names)) is not None:
                whole[prefix.key] = prefix
        children: dict[str | None, list[FoundPrefix]] = {}
        for prefix in sorted(whole.values(), key=lambda each: each.used_at):
            children.setdefault(prefix.parent, []).append(prefix)
        known, coming = set(), deque(children.get(None, ()))
        order: list[FoundPrefix] = []
        while coming:
            prefix = coming.popleft()
            known.add(prefix.key)
            order.append(prefix)
            coming.extend(each for each in children.get(prefix.key, ()) if each.at <= len(prefix.tokens))
        for name in names:
            if name[:24] not in known or name.endswith(".new"):
                with suppress(OSError):
                    (self._folder / name).unlink()
        return order

    def _look_at(self, key: str, names: set[str]) -> FoundPrefix | None:
        path = self._folder / f"{key}.json"
        try:
            if path.stat().st_size > MOST_RECORD_BYTES:
                return None
            values = read_json(path, str(path))
            check_format(values["format"], path, "this prefix is removed, and read anew when it comes again")
            record = PrefixRecord(**{**values, "tokens": tuple(values["tokens"])})
            columns = range(self._comm.mesh.tp_size)
            wanted = {f"{key}.{cp}-{tp}.safetensors" for cp in range(record.cp) for tp in columns}
            if not wanted <= names:
                return None
            stats = [(self._folder / name).stat() for name in wanted]
        except MegaKVError as error:
            logger.warning("%s", error)
            return None
        except (OSError, ValueError, TypeError, KeyError):
            return None
        tokens = np.array(record.tokens, dtype=np.int32)
        nbytes, used_at = sum(stat.st_size for stat in stats), path.stat().st_mtime
        return FoundPrefix(key, tokens, record.parent, record.at, record.cp, nbytes, used_at)

    def close(self) -> None:
        """Write what is to be written, and end."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()
