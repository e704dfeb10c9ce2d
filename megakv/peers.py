"""Who the other ranks are, and which of them have died."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import psutil

GRACE_SECONDS = 2.0
"""How long to look for a dead process after a connection broke: the kernel may report the break first."""


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


class PeerWatch:
    """Names the ranks whose processes are gone, as far as this host can see them."""

    def __init__(self, rank: int, peers: list[Peer]):
        self.rank = rank
        self._peers = peers
        self._previous: Any = None

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self._peers[self.rank].host

    def dead(self, *, grace: float = 0.0) -> list[int]:
        """Ranks on this host whose process is gone, looked for during up to `grace` seconds."""
        me = self._peers[self.rank]
        near = [p for p in self._peers if (p.host, p.pid_space) == (me.host, me.pid_space) and p.rank != self.rank]
        deadline = time.monotonic() + grace
        while True:
            dead = [peer.rank for peer in near if _gone(peer.pid)]
            if dead or time.monotonic() >= deadline:
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
        """Give SIGTERM back."""
        if self._previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _on_terminate(self, signum: int, frame: FrameType | None) -> None:
        for rank in self.dead():
            sys.stderr.write(f"megakv: rank {self.rank} ends because {self.describe(rank)} was lost\n")
        sys.stderr.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
