"""Small messages between the ranks of a group, by compiled calls: through memory of one host, or over connections.

A step of decoding waits for others several times in every layer. Through memory that all of them see a message takes a
few microseconds; over a connection of each to each (`direct`), between hosts, some twenty. Whoever computes in a
compiled call exchanges messages within it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megakv.base.errors import MegaKVError
from megakv.base.library import fault, load
from megakv.distributed.direct import SPIN_SECONDS, Links, is_over

K = TypeVar("K")
FOLDER = Path("/dev/shm")
SLOT_BYTES = 256 << 10
"""Longer messages go through memory in pieces of this size."""
SIZES, CLOSED = 3, 16
"""Why a message did not come, by the calls' numbers: sizes differ; from `CLOSED` on, whose connection is over."""
_Waiting = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_double)


class ChannelCalls:
    """The compiled calls. An OSError says that they cannot be loaded."""

    def __init__(self, path: Path):
        library = ctypes.CDLL(str(path))
        whole, pointer = ctypes.c_int64, ctypes.c_void_p
        self.bytes, self.exchange = library.megakv_channel_bytes, library.megakv_channel_exchange
        self.bytes.argtypes, self.bytes.restype = [whole, whole], whole
        self.exchange.argtypes, self.exchange.restype = [pointer, pointer, whole, pointer, whole], ctypes.c_int


class _Channel(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("waiting", _Waiting), ("memory", ctypes.c_void_p), ("links", ctypes.POINTER(ctypes.c_int)),
        *((name, ctypes.c_int64) for name in ("ranks", "own", "slot", "memory_bytes")),
        ("number", ctypes.c_uint64), ("spinning", ctypes.c_double), ("failed", ctypes.c_int64),
    ]  # fmt: skip


class Channel:
    """What a group of ranks, of which this is number `own`, exchanges messages through: `memory` of theirs, or links.

    `links` are the connections to the others, by their numbers in the world; whoever is waited for longer than
    `timeout_s`, or whose connection is over, is not waited for any more. With `spins` nobody sleeps at first.
    """

    def __init__(
        self,
        calls: ChannelCalls,
        ranks: Sequence[int],
        own: int,
        links: Links,
        *,
        memory: mmap.mmap | None = None,
        spins: bool = True,
        timeout_s: float,
    ):
        self._calls, self.ranks, self._links, self._timeout_s = calls, tuple(ranks), links, timeout_s
        # As long as this is held, the memory cannot be closed.
        self._first = None if memory is None else ctypes.c_char.from_buffer(memory)
        self._error: BaseException | None = None
        self._watch = _watching(weakref.ref(self))
        next(self._watch)
        handles = [links[rank].fileno() if rank in links else -1 for rank in ranks]
        self._channel = _Channel(
            waiting=_Waiting(self._watch.send),
            memory=None if self._first is None else ctypes.addressof(self._first),
            links=(ctypes.c_int * len(ranks))(*handles),
            ranks=len(ranks),
            own=own,
            slot=SLOT_BYTES,
            memory_bytes=0 if memory is None else len(memory),
            spinning=SPIN_SECONDS if spins else 0.0,
        )
        self.address = ctypes.addressof(self._channel)

    @property
    def in_memory(self) -> bool:
        """Whether messages go through memory that ranks share."""
        return self._first is not None

    def all_gather(self, send: Tensor, received: Tensor) -> None:
        """``[N, ...]`` of what all ranks send, contiguous and of one size, in their order.

        A `DistNetworkError` says that another rank's connection is over, or that nothing came in time.
        """
        sizes = send.nbytes, received.data_ptr(), received.nbytes
        if send.nbytes and (code := self._calls.exchange(self.address, send.data_ptr(), *sizes)):
            self.check()
            raise fault(code, "a message")

    def check(self) -> None:
        """Raise what kept a message from coming, if something did."""
        error, failed, self._error = self._error, self._channel.failed, None
        self._channel.failed = 0
        if error is not None:
            raise error
        if failed == SIZES:
            raise MegaKVError("ranks exchange messages of different sizes")
        if failed:
            raise dist.DistNetworkError(f"Connection closed by rank {self.ranks[failed - CLOSED]}")

    def look(self, seconds: float) -> None:
        """Whoever is waited for, for so long by now, is there, or a `DistNetworkError` says what is wrong."""
        for rank in self.ranks:
            if rank in self._links and is_over(self._links[rank]):
                raise dist.DistNetworkError(f"Connection closed by rank {rank}")
        if seconds > self._timeout_s:
            raise dist.DistNetworkError(f"Timed out after {self._timeout_s:g} s")

    def give_up(self, error: BaseException) -> None:
        """What `check` is to raise."""
        self._error = error


def _watching(reference: weakref.ref[Channel]) -> Generator[int, float, None]:
    """Given how long a call has waited, whether it is to give up.

    A call waits where nothing is raised through. What a signal raises comes where Python goes on: here that is within
    the block, which of a function it is not. A channel is referred to, lest it should wait for a look at circles to go.
    """
    answer = 0
    while True:
        try:
            seconds = yield answer
            if (channel := reference()) is not None:
                channel.look(seconds)
            answer = 0
        except GeneratorExit:
            return
        except BaseException as error:
            if (channel := reference()) is not None:
                channel.give_up(error)
            answer = 1
        channel = None


def make_channels(
    groups: Mapping[K, tuple[int, ...]],
    rank: int,
    gather: Callable[[Any], list[Any]],
    links: Links,
    *,
    spins: bool,
    timeout_s: float,
) -> dict[K, Channel]:
    """Those of a rank's groups of several ranks, by whatever names these have: one for each set of ranks."""
    made = dict[tuple[int, ...], Channel | None]()
    for ranks in groups.values():
        if len(ranks) > 1 and ranks not in made:
            made[ranks] = make_channel(ranks, ranks.index(rank), gather, links, spins=spins, timeout_s=timeout_s)
    return {name: channel for name, ranks in groups.items() if (channel := made.get(ranks)) is not None}


def make_channel(
    ranks: Sequence[int],
    own: int,
    gather: Callable[[Any], list[Any]],
    links: Links,
    *,
    spins: bool,
    timeout_s: float,
) -> Channel | None:
    """One for some ranks of the world, of which this is number `own`; None, on all ranks, where one cannot have one.

    Every rank of the world calls it, with its own group: `gather` gives each of them what all passed to it. Ranks of
    one host that have a core each have memory of theirs.
    """
    calls = load_channel()[0]
    if not all(gather(calls is not None)):
        return None
    assert calls is not None
    memory = _shared_memory(calls, ranks, own, gather, wanted=spins)
    return Channel(calls, ranks, own, links, memory=memory, spins=spins, timeout_s=timeout_s)


def _shared_memory(
    calls: ChannelCalls, ranks: Sequence[int], own: int, gather: Callable[[Any], list[Any]], *, wanted: bool
) -> mmap.mmap | None:
    """Memory that all of the group see; None, on all of them, where one does not, or does not want it."""
    memory: mmap.mmap | None = None
    size, made = calls.bytes(len(ranks), SLOT_BYTES), ""
    if wanted and own == 0:
        with suppress(OSError):
            made, memory = _made(size)
    try:
        path = gather(made)[ranks[0]]
        if wanted and own and path:
            with suppress(OSError):
                memory = _opened(path, size)
        found = gather(memory is not None)
    finally:
        if made:
            with suppress(OSError):
                os.unlink(made)
    return memory if all(found[rank] for rank in ranks) else None


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
def load_channel() -> tuple[ChannelCalls | None, str]:
    """The calls, or None and why there are none; compiled, within seconds, if this machine does not have them yet."""
    return load("channel", ChannelCalls, _problem)


def _problem(calls: ChannelCalls) -> str:
    """What is wrong with messages between threads; empty if nothing is."""
    memory = mmap.mmap(-1, calls.bytes(2, SLOT_BYTES))
    with ExitStack() as stack:
        pair = [stack.enter_context(each) for each in socket.socketpair()]
        for box in (memory, None):
            if not _alike(calls, pair, box):
                return f"compiled, messages through {'links' if box is None else 'memory'} come out wrong"
    return ""


def _alike(calls: ChannelCalls, pair: Sequence[socket.socket], memory: mmap.mmap | None) -> bool:
    """Whether two threads have what both sent."""
    sizes = (8, 24, 1)
    sent = [
        [torch.full((size,), 1 + rank + 2 * n, dtype=torch.uint8) for n, size in enumerate(sizes)] for rank in (0, 1)
    ]
    found = [[torch.zeros(2, size, dtype=torch.uint8) for size in sizes] for _ in range(2)]

    def exchange(own: int) -> None:
        channel = Channel(calls, range(2), own, {1 - own: pair[own]}, memory=memory, timeout_s=10)
        for message, received in zip(sent[own], found[own], strict=True):
            channel.all_gather(message, received)

    threads = [threading.Thread(target=exchange, args=(own,)) for own in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(
        torch.equal(found[own][n], torch.stack([s[n] for s in sent])) for own in (0, 1) for n in range(len(sizes))
    )
