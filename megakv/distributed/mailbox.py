"""Small messages between the ranks of one host, through memory that all of them see.

A step of decoding waits for others twice in every layer. Through memory a message takes a few microseconds; over a
connection (`direct`), which remains the way between hosts, it takes some fifty.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megakv.distributed.direct import SPIN_SECONDS, Links, is_over
from megakv.errors import MegaKVError
from megakv.library import load

FOLDER = Path("/dev/shm")
SLOT_BYTES = 256 << 10
"""Messages up to this size go this way."""
SLICE_S = 0.05
"""How long one call waits: between two of them others' connections are looked at."""


class MailboxCalls:
    """The compiled calls. An OSError says that they cannot be loaded."""

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        number, whole, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        self.bytes, self.exchange = library.megakv_mailbox_bytes, library.megakv_mailbox_exchange
        self.bytes.argtypes, self.bytes.restype = [number, whole], whole
        self.exchange.argtypes = [
            pointer, number, number, whole, ctypes.c_uint64, pointer, whole, pointer, ctypes.c_double, ctypes.c_double,
        ]  # fmt: skip
        self.exchange.restype = number


class Mailbox:
    """What a group of ranks of one host, of which this is number `own`, exchange in memory of theirs."""

    def __init__(self, calls: MailboxCalls, memory: mmap.mmap, ranks: Sequence[int], own: int):
        self._calls, self._ranks, self._own = calls, ranks, own
        # As long as this is held, the memory cannot be closed.
        self._first = ctypes.c_char.from_buffer(memory)
        self._address = ctypes.addressof(self._first)
        self._number = 0

    def all_gather(self, send: Tensor, received: Tensor, links: Links, *, timeout_s: float) -> None:
        """``[N, ...]`` of what all ranks send, contiguous and of one size, in their order.

        A `DistNetworkError` says that another rank's connection is over, or that nothing came within `timeout_s`.
        """
        if not send.nbytes:
            return
        number, begun = self._number, 0.0
        address: int | None = send.data_ptr()
        self._number += 1
        while failed := self._calls.exchange(
            self._address, len(self._ranks), self._own, SLOT_BYTES, number, address, send.nbytes,
            received.data_ptr(), SLICE_S, SPIN_SECONDS,
        ):  # fmt: skip
            if failed != 1:
                raise MegaKVError("ranks exchange messages of different sizes")
            address, now = None, time.monotonic()
            begun = begun or now
            for rank in self._ranks:
                if rank in links and is_over(links[rank]):
                    raise dist.DistNetworkError(f"Connection closed by rank {rank}")
            if now - begun > timeout_s:
                raise dist.DistNetworkError(f"Timed out after {timeout_s:g} s")


def make_mailbox(
    ranks: Sequence[int], own: int, gather: Callable[[Any], list[Any]], *, wanted: bool = True
) -> Mailbox | None:
    """One for some ranks of the world, of which this is number `own`; None, on all of them, where they cannot have one,
    or it is not `wanted` by one.

    Every rank of the world calls it, with its own group: `gather` gives each of them what all passed to it.
    """
    calls = load_mailbox()[0] if wanted else None
    memory: mmap.mmap | None = None
    made = ""
    if calls is not None and own == 0:
        with suppress(OSError):
            made, memory = _made(calls.bytes(len(ranks), SLOT_BYTES))
    try:
        path = gather(made)[ranks[0]]
        if calls is not None and own and path:
            with suppress(OSError):
                memory = _opened(path, calls.bytes(len(ranks), SLOT_BYTES))
        found = gather(memory is not None)
    finally:
        if made:
            with suppress(OSError):
                os.unlink(made)
    if calls is None or memory is None or not all(found[rank] for rank in ranks):
        return None
    return Mailbox(calls, memory, ranks, own)


def _made(size: int) -> tuple[str, mmap.mmap]:
    """New memory under a name that others may open."""
    path = str(FOLDER / f"megakv-{os.getpid()}-{secrets.token_hex(8)}")
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Taken at once: where there is too little, a write would end the process.
        os.posix_fallocate(handle, 0, size)
        return path, mmap.mmap(handle, size)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(handle)


def _opened(path: str, size: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)


@functools.cache
def load_mailbox() -> tuple[MailboxCalls | None, str]:
    """The calls, or None and why there are none; compiled, within seconds, if this machine does not have them yet."""
    return load("mailbox", MailboxCalls, _problem)


def _problem(calls: MailboxCalls) -> str:
    """What is wrong with messages between threads; empty if nothing is."""
    ranks, sizes = 2, (8, 24, 1)
    memory = mmap.mmap(-1, calls.bytes(ranks, SLOT_BYTES))
    sent = [
        [torch.full((size,), 1 + rank + 2 * n, dtype=torch.uint8) for n, size in enumerate(sizes)] for rank in (0, 1)
    ]
    found = [[torch.zeros(ranks, size, dtype=torch.uint8) for size in sizes] for _ in range(ranks)]

    def exchange(own: int) -> None:
        box = Mailbox(calls, memory, range(ranks), own)
        for message, received in zip(sent[own], found[own], strict=True):
            box.all_gather(message, received, {}, timeout_s=10)

    threads = [threading.Thread(target=exchange, args=(own,)) for own in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    right = all(
        torch.equal(found[own][n], torch.stack([s[n] for s in sent])) for own in (0, 1) for n in range(len(sizes))
    )
    return "" if right else "compiled, messages through memory come out wrong"
