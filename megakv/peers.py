"""Who the other ranks are, and which of them have died."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import psutil

from megakv.connections import PeerConnections

GRACE_SECONDS = 2.0
"""How long to look for a dead process after a connection broke: the kernel may report the break first."""

POLL_SECONDS = 0.5

UNHEARD_SECONDS = 5.0
"""How long an operation may go on after a connection was seen to be over: most fail at once."""


@dataclass(frozen=True)
class Peer:
    """A rank's process."""

    rank: int
    host: str
    pid: int
    pid_space: str

    @classmethod
    def this(cls, rank: int) -> Peer:
        """The calling process."""
        try:
            pid_space = os.readlink("/proc/self/ns/pid")
        except OSError:
            pid_space = ""
        return cls(rank=rank, host=socket.gethostname(), pid=os.getpid(), pid_space=pid_space)


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


@dataclass(frozen=True)
class _Operation:
    """An operation under way that may never fail by itself."""

    operation: str
    since: float


class PeerWatch:
    """Names the ranks whose processes are gone, as far as this host can see them.

    Parameters
    ----------
    rank : int
        This rank.
    peers : list of Peer
        All ranks, this one included.
    timeout_s : float
        How long a silent peer is waited for.

    Attributes
    ----------
    lost : bool
        Whether an exchange with a peer has failed.
    connections : PeerConnections or None
        To the other ranks, where they are watched.
    """

    def __init__(self, rank: int, peers: list[Peer], timeout_s: float):
        self.rank = rank
        self._peers = peers
        self._timeout_s = timeout_s
        self.lost = False
        self.connections: PeerConnections | None = None
        self._previous: Any = None
        self._spin: _Operation | None = None
        self._wait: _Operation | None = None
        self._stop: threading.Event | None = None

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self._peers[self.rank].host

    @property
    def neighbours(self) -> int:
        """Ranks on this host, this one included."""
        return sum(peer.host == self.host for peer in self._peers)

    def dead(self, *, grace: float = 0.0) -> list[int]:
        """Ranks on this host whose process is gone, looked for during up to `grace` seconds."""
        me = self._peers[self.rank]
        near = [p for p in self._peers if (p.host, p.pid_space) == (me.host, me.pid_space) and p.rank != self.rank]
        deadline = time.monotonic() + grace
        while True:
            dead = [peer.rank for peer in near if _gone(peer.pid)]
            if dead or not near or time.monotonic() >= deadline:
                return dead
            time.sleep(0.05)

    def describe(self, rank: int) -> str:
        """A rank with its host and process, for messages."""
        peer = self._peers[rank]
        return f"rank {rank} (host {peer.host}, pid {peer.pid})"

    def install(self) -> None:
        """Say which peer was lost before a launcher's SIGTERM ends this process.

        Launchers end the surviving ranks as soon as one dies, often before a survivor's pending receive fails. Only
        where nobody else handles the signal, and only in the main thread.
        """
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._previous = signal.signal(signal.SIGTERM, self._on_terminate)

    def uninstall(self) -> None:
        """Give SIGTERM back, and end the watch over spinning operations."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        if self._previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _on_terminate(self, signum: int, frame: FrameType | None) -> None:
        # One message: some of them may have ended because of the first, which nobody can tell any more.
        if dead := self.dead():
            self._say(f"{', '.join(map(self.describe, dead))} was lost")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _say(self, reason: str) -> None:
        # Not by sys.stderr: a signal may have come in the middle of a write to it.
        os.write(2, f"megakv: rank {self.rank} ends because {reason}\n".encode())

    @contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Watch over an operation that fails when a connection to a peer is over, as a rule.

        Gloo closes a broken connection, but a receive that begins just then may never hear of it, and would wait for
        `timeout_s`. Once that is seen, the process ends, with a word about why.
        """
        if not self.connections:
            yield
            return
        self._watch()
        before, self._wait = self._wait, _Operation(operation, time.monotonic())
        try:
            yield
        finally:
            self._wait = before

    def _watch(self) -> None:
        if self._stop is None:
            self._stop = threading.Event()
            threading.Thread(target=self._watch_all, args=(self._stop,), name="megakv-watch", daemon=True).start()

    @contextmanager
    def spinning(self, operation: str) -> Iterator[None]:
        """Watch over an operation that waits for its peers for ever, in C++, deaf to signals and errors.

        Nothing but the end of the process ends it when a peer is lost, so that is what happens, with a word about why.
        """
        self._watch()
        self._spin = _Operation(operation, time.monotonic())
        try:
            yield
        finally:
            self._spin = None

    def _watch_all(self, stop: threading.Event) -> None:
        suspect: _Operation | None = None
        unheard: _Operation | None = None
        since = 0.0
        while not stop.wait(POLL_SECONDS):
            spin, wait = self._spin, self._wait
            # Whatever does hear of it ends the wait, and says more.
            over = self.connections.over() if wait is not None and self.connections else []
            if not over or wait is not unheard:
                unheard, since = wait if over else None, time.monotonic()
            elif wait is not None and time.monotonic() - since > UNHEARD_SECONDS and wait is self._wait:
                self._leave(f"the connection to {', '.join(map(self.describe, over))} was lost during {wait.operation}")
            if spin is None:
                continue
            dead = self.dead()
            # Only at the second sight: a peer may have ended in good order just after this very operation.
            if dead and spin is suspect and spin is self._spin:
                self._leave(f"{', '.join(map(self.describe, dead))} was lost during {spin.operation}")
            suspect = spin if dead else None
            if time.monotonic() - spin.since > self._timeout_s and spin is self._spin:
                others = ", ".join(self.describe(peer.rank) for peer in self._peers if peer.rank != self.rank)
                self._leave(f"{others} did not answer during {spin.operation} (megakv.timeout_s = {self._timeout_s:g})")

    def _leave(self, reason: str) -> NoReturn:
        self._say(reason)
        os._exit(1)
