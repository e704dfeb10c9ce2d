"""Who the other ranks are, and which of them have died."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import psutil

from megakv.base.errors import MegaKVError, PeerLostError
from megakv.distributed.failures import Failures, broke
from megakv.distributed.health import HealthChannel

GRACE_SECONDS = 2.0
"""How long to wait for word of who failed or is gone after a connection broke: the break may be heard of first."""
POLL_SECONDS = 0.5
UNHEARD_SECONDS = 5.0
"""How long an operation may go on after a peer was lost or gave up: most fail at once."""
DRAIN_SECONDS = 0.2
"""How long the connections of a call that failed stay: what was sent before may still be on its way to ranks behind."""
FAREWELL_SECONDS = 1.0
"""How long what was said of a loss has to leave this process, where it must end at once."""
LOST_SECONDS = 2.0
"""How long the connections stay where a process is gone: gloo's own ends of them say more, and say it at once."""


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


class _Wait(NamedTuple):
    """An operation under way, which fails when a connection to a peer is over as a rule; one that `spins` never does.

    Gloo closes a broken connection, but a receive that begins just then may never hear of it, and would wait for
    `timeout_s`. A sum in shared memory waits for ever, in C++, deaf to signals and errors.
    """

    operation: str
    since: float
    spins: bool


class PeerWatch:
    """Names the ranks whose processes are gone, and ends the waits for them that would not end by themselves.

    `sever` ends the connections of the mesh's groups, and with them whatever waits for its peers. By `channel` other
    ranks' failures are heard of; it is closed in the end.
    """

    def __init__(
        self, rank: int, peers: list[Peer], timeout_s: float, sever: Callable[[], None], channel: HealthChannel
    ):
        self.rank = rank
        self._peers = peers
        self._timeout_s = timeout_s
        self._sever = sever
        self.failures = Failures(rank, len(peers))
        self.channel = channel
        # A process that ends in good order says so, though nobody has destroyed its engine.
        self._farewell = weakref.finalize(self, channel.end)
        self._previous: Any = None
        self._wait: _Wait | None = None
        # Of which wait the end of a peer was seen first, and when.
        self._since: tuple[_Wait | None, float] | None = None
        self.severed = False
        """Whether the connections of the groups' present life were ended."""
        self.on_loss: Callable[[str], object] | None = None
        """Told why, by another thread, as soon as a rank is lost, and before a process ends whose work hangs."""
        self._stop = threading.Event()
        # Holds the watch weakly: it ends when nobody else does any more.
        watch = partial(_watch_all, weakref.ref(self), self._stop)
        self._thread = threading.Thread(target=watch, name="megakv-watch", daemon=True)
        if len(peers) > 1:
            self._thread.start()

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self._peers[self.rank].host

    @property
    def neighbours(self) -> int:
        """Ranks on this host, this one included."""
        return sum(peer.host == self.host for peer in self._peers)

    def dead(self) -> list[int]:
        """Ranks whose process is gone."""
        me = self._peers[self.rank]
        near = [p for p in self._peers if (p.host, p.pid_space) == (me.host, me.pid_space) and p.rank != self.rank]
        # A fork of a process that is gone may hold its connections.
        return sorted({*self.failures.lost, *(peer.rank for peer in near if _gone(peer.pid))})

    def describe(self, *ranks: int) -> str:
        """Ranks with their hosts and processes, for messages."""
        return ", ".join(f"rank {rank} (host {self._peers[rank].host}, pid {self._peers[rank].pid})" for rank in ranks)

    def install(self) -> None:
        """Say which peer was lost before a launcher's SIGTERM ends this process.

        Launchers end the surviving ranks as soon as one dies, often before a survivor's pending receive fails. Only
        where nobody else handles the signal, and only in the main thread.
        """
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._previous = signal.signal(signal.SIGTERM, self._on_terminate)

    def uninstall(self) -> None:
        """Give SIGTERM back, say goodbye to the other ranks, and end the watch over them."""
        self._stop.set()
        self._farewell()
        if self._thread.is_alive():
            self._thread.join()
        self.channel.close()
        if self._previous is not None and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._on_terminate:
                signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    # What others do

    def check(self, where: str) -> None:
        """Refuse to exchange anything with ranks of which one gave up, or is gone."""
        if self.failures.quiet:
            return
        if (told := self.failures.verdict()) is not None:
            raise self.failures.follow(told)
        if lost := self.failures.lost:
            self.failures.miss(lost)
            raise PeerLostError(f"rank {self.rank}: {self.describe(*lost)} was lost before {where}")

    def explain(self, error: BaseException, peers: Sequence[int], where: str) -> MegaKVError:
        """Why a connection broke, or nobody answered."""
        if (told := self.failures.wait(GRACE_SECONDS)) is not None:
            return self.failures.follow(told)
        dead = self.dead()
        missing = dead or sorted({rank for rank in peers if rank != self.rank})
        self.failures.miss(missing)
        who = f"rank {self.rank}: {self.describe(*missing)}"
        if dead:
            return PeerLostError(f"{who} was lost during {where}: see its own message, or dmesg where it was killed")
        reason = str(error).splitlines()[0].partition(" This is typically")[0]
        return PeerLostError(f"{who} did not answer during {where} (megakv.timeout_s = {self._timeout_s:g}): {reason}")

    def guard(self, peers: Sequence[int], operation: str, layer: int | None, *, spins: bool = False) -> Guard:
        """What is to be around an operation with some ranks."""
        return Guard(self, peers, operation, layer, spins)

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank gives up, and wait until all have: then nobody waits for anybody."""
        message = self.failures.fail(error)
        self.channel.tell(message)
        # Who waits for this rank, and is told, ends its own wait; one that has not come so far may yet fail alike, and
        # then all go on with the same connections. What was exchanged by halves ends them at once.
        if (self.channel.deaf or message["inside"]) and not self.failures.settle(DRAIN_SECONDS):
            self.sever()
        if not self.failures.settle(self._timeout_s):
            self.failures.give_up()

    def desert(self, error: BaseException) -> None:
        """This rank ends with an error that nobody goes on from: the others lose it as if it had been killed."""
        if len(self._peers) > 1 and self._farewell.detach() is not None:
            self.on_loss = None
            self._say(f"it failed: {type(error).__name__}: {error}".removesuffix(": "))
            self.failures.give_up()
            self.channel.end(lost=True)
            self.sever()

    def sever(self, life: int | None = None) -> None:
        """End the connections of the mesh's groups, once in their life: the present one, or none if that is over."""
        if not self.severed and life in (None, self.failures.life):
            self.severed = True
            self._sever()

    # Waits

    def enter_wait(self, operation: str, *, spins: bool = False) -> _Wait | None:
        """Watch over an operation: if it never hears that a peer is gone, the process ends, with a word about why.

        Returns what `leave_wait` wants to know.
        """
        before, self._wait = self._wait, _Wait(operation, time.monotonic(), spins)
        return before

    def leave_wait(self, before: _Wait | None) -> None:
        """It is over."""
        self._wait = before

    def look(self, stop: threading.Event) -> None:
        """Hear what there is to hear for a moment, and end waits that would not end by themselves."""
        seconds = POLL_SECONDS if self.failures.quiet else DRAIN_SECONDS
        if not self.channel.open:
            stop.wait(seconds)
        else:
            messages = self.channel.poll(seconds)
            for message in messages:
                self.failures.take(message)
            # Whoever listens may cease to at any moment.
            if messages and (lost := self.failures.lost) and (told := self.on_loss) is not None:
                told(f"rank {self.rank}: {self.describe(*lost)} was lost")
        if not stop.is_set():
            self._end_wait()

    def _end_wait(self) -> None:
        now, wait, life = time.monotonic(), self._wait, self.failures.life
        spins = wait is not None and wait.spins
        verdict, lost = self.failures.verdict(), self.dead() if spins else self.failures.lost
        if verdict is None and not lost:
            self._since = None
            if wait is not None and spins and now - wait.since > self._timeout_s:
                others = self.describe(*(peer.rank for peer in self._peers if peer.rank != self.rank))
                limit = f"megakv.timeout_s = {self._timeout_s:g}"
                self._leave(wait, f"{others} did not answer during {wait.operation} ({limit})")
            return
        if self._since is None or self._since[0] is not wait:
            self._since = wait, now
        after = now - self._since[1]
        if after >= DRAIN_SECONDS and verdict is not None or after >= LOST_SECONDS and lost:
            self.sever(life)
        # A spinning one ends at the second sight: a peer may have ended in good order just after this very operation.
        # Of others, whatever does hear of it ends the wait, and says more.
        if wait is not None and after > (0.0 if spins else UNHEARD_SECONDS):
            lost_during = f"{self.describe(*lost)} was lost during {wait.operation}"
            self._leave(wait, lost_during if verdict is None else verdict.says)

    def _leave(self, wait: _Wait, reason: str) -> None:
        if wait is self._wait:
            self._say(reason)
            try:
                if (told := self.on_loss) is not None:
                    told(reason)
                    time.sleep(FAREWELL_SECONDS)
            finally:
                os._exit(1)

    def _on_terminate(self, signum: int, frame: FrameType | None) -> None:
        if (own := self.failures.own) is not None:
            # The others leave on account of it: nobody was lost.
            self._say(f"it failed: {own.text}")
        elif dead := self.dead():
            # One message: some of them may have ended because of the first, which nobody can tell any more.
            self._say(f"{self.describe(*dead)} was lost")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _say(self, reason: str) -> None:
        # Not by sys.stderr: a signal may have come in the middle of a write to it.
        os.write(2, f"megakv: rank {self.rank} ends because {reason}\n".encode())


class Guard:
    """Turn a broken connection or a time-out into an error that names the lost rank and what was going on.

    Where another rank gave up, its error comes instead. Any other error stays what it is. An operation that `spins`
    would never end by itself. Every message of every layer makes one: it is small.
    """

    __slots__ = ("_before", "_peers", "_spins", "_watch", "_where")

    def __init__(self, watch: PeerWatch, peers: Sequence[int], operation: str, layer: int | None, spins: bool = False):
        self._watch, self._peers, self._spins = watch, peers, spins
        self._where = operation if layer is None else f"{operation} of layer {layer}"

    def __enter__(self) -> None:
        try:
            self._watch.check(self._where)
        except BaseException:
            self._watch.failures.inside = True
            raise
        self._before = self._watch.enter_wait(self._where, spins=self._spins)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._watch.leave_wait(self._before)
        if error is not None:
            # Others may hold half of what was exchanged.
            self._watch.failures.inside = True
            if broke(error):
                raise self._watch.explain(error, self._peers, self._where) from error


def _watch_all(reference: weakref.ref[PeerWatch], stop: threading.Event) -> None:
    """Watch until told to stop, or until nobody holds the watch any more."""
    while not stop.is_set() and (watch := reference()) is not None:
        watch.look(stop)
        del watch
