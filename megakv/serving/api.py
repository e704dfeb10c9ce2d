"""The process that speaks HTTP, as rank 0 has it: started beside it, told what passes come to, and ended with it."""

from __future__ import annotations

import logging
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from megakv.base.errors import MegaKVError
from megakv.serving.form import Form
from megakv.serving.http.settings import HttpSettings
from megakv.serving.inbox import TooLongError
from megakv.serving.loop import RefusedError, ServingLoop
from megakv.serving.messages import (
    MOST_FROM_HTTP,
    Header,
    Messages,
    events_message,
    message,
    read_submit,
    stats_message,
)
from megakv.serving.request import Event
from megakv.serving.stats import State

if TYPE_CHECKING:
    from megakv.serving.http.call import ServedModel

logger = logging.getLogger(__name__)

FORMS = 8
"""Grammars whose forms are held: making one takes up to seconds."""
READ_BYTES = 1 << 18
SEND_S = 30.0
"""How long the process may leave what passes come to unread."""
START_S = 180.0
END_S = 20.0
"""How long the process may take to end: clients read the end of their answers."""


class ApiLink:
    """Rank 0's end of the socket: a thread takes requests from it; events of a step go there in one message.

    `form` makes a form of its grammar, `fate` says how whoever has the other end has ended.
    """

    def __init__(
        self,
        loop: ServingLoop,
        connection: socket.socket,
        form: Callable[[str], Form],
        fate: Callable[[], str] = lambda: "",
    ):
        self._loop, self._connection, self._form, self._fate = loop, connection, form, fate
        # A loop may have several.
        self._name = uuid.uuid4().hex
        self._events: list[tuple[int, Event]] = []
        self._said: State | None = None
        # Events are added by the thread that computes, and by another one when a rank is lost.
        self._sending = threading.Lock()
        self._asked, self._asks = os.pipe()
        self._stops = False
        self.stands = False
        """Whether requests are taken there."""
        self.decided = threading.Event()
        """Set when they are, or never will be."""
        self._thread = threading.Thread(target=self._run, name="megakv-api", daemon=True)
        self._wait(START_S)

    def start(self) -> None:
        """Begin to take requests."""
        self._loop.listeners.append(self._tell)
        self._thread.start()

    def send(self, content: bytes) -> None:
        """Send a message; to one that has ended nothing."""
        with self._sending:
            self._send(content)

    def drain(self) -> None:
        """Take no more requests; safe in a signal's handler, and as often as one likes."""
        # Once it stops there is nothing to drain.
        if not self._stops:
            os.write(self._asks, b"d")

    def stop(self) -> None:
        """Have the other end write what is to be written, and end."""
        self._stops = True
        self._tell()
        self.send(message({"op": "stop"}))

    def close(self) -> None:
        """End, once the other end has."""
        self._stops = True
        self._loop.listeners.remove(self._tell)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()
        for end in (self._asked, self._asks):
            os.close(end)

    # What the loop says

    def _wait(self, seconds: float) -> None:
        """Set how long a message may wait to be read."""
        self._most_s = seconds
        timeout = struct.pack("ll", int(seconds), 0)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def _put(self, number: int, event: Event) -> None:
        with self._sending:
            self._events.append((number, event))

    def _tell(self) -> None:
        """Send what requests were told since the last time, and whether requests are taken."""
        with self._sending:
            events, state = self._events, self._loop.state
            if events or state != self._said:
                self._events, self._said = [], state
                self._send(events_message(events, state))

    def _send(self, content: bytes) -> None:
        try:
            self._connection.sendall(content)
        except BlockingIOError:
            self._loop.fail(f"the process that speaks HTTP has read nothing for {self._most_s:g} s")
            # A message that was sent by halves is the last one.
            self._stops = True
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            # Whoever reads sees its end.
            pass

    # What clients want

    def _run(self) -> None:
        why = "ended"
        try:
            self._read()
        except Exception as error:
            logger.exception("a message of the process that speaks HTTP")
            why = f"sent what cannot be read ({type(error).__name__}: {error})"
        finally:
            if not self._stops:
                self._loop.fail(f"the process that speaks HTTP has {why}{self._fate()}")
            self.decided.set()

    def _read(self) -> None:
        messages, ready = Messages(MOST_FROM_HTTP), select.poll()
        ready.register(self._connection, select.POLLIN)
        ready.register(self._asked, select.POLLIN)
        while True:
            found = [file for file, _ in ready.poll()]
            if self._asked in found:
                os.read(self._asked, 1)
                self._loop.drain()
                self._tell()
            if self._connection.fileno() in found:
                try:
                    content = self._connection.recv(READ_BYTES)
                except ConnectionError:
                    return
                if not content:
                    return
                for header, tail in messages.add(content):
                    self._take(header, tail)

    def _take(self, header: Header, tail: bytes) -> None:
        match header["op"]:
            case "submit":
                self.send(message({"op": "taken", "n": header["n"]} | self._submit(header, tail)))
            case "cancel":
                self._loop.cancel(self._id(header["n"]))
            case "stats":
                self.send(stats_message(self._loop.stats(), self._loop.documents() if header["documents"] else []))
            case "standing":
                self._wait(SEND_S)
                self.stands = True
                self.decided.set()
            case other:
                raise ValueError(f"no message is called {other!r}")

    def _submit(self, header: Header, tail: bytes) -> dict[str, Any]:
        """Submit a request; return nothing, or why it is refused."""
        number: int = header["n"]
        try:
            self._loop.submit(read_submit(header, tail, self._id(number), partial(self._put, number), self._form))
        except RefusedError as error:
            return {"refused": "now", "why": str(error)}
        except TooLongError as error:
            return {"refused": "length", "why": str(error)}
        except ValueError as error:
            return {"refused": "ever", "why": str(error)}
        return {}

    def _id(self, number: int) -> str:
        return f"{self._name}-{number}"


class ApiProcess:
    """A child process that speaks HTTP, which answers that the model is being loaded until `serve`.

    It has its end of the socket and the listener, and ends when rank 0 does, however that ends.
    """

    def __init__(self, settings: HttpSettings, listener: socket.socket):
        self.settings = settings
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._socket, theirs = socket.socketpair()
        with theirs:
            handed = theirs.fileno(), listener.fileno()
            words = [sys.executable, "-P", "-m", "megakv.serving.http.process", *map(str, handed)]
            # Of this process's group: whoever ends that at once ends it, too.
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=handed)
        self._link: ApiLink | None = None
        self._closed = False
        with suppress(ConnectionError):
            self._socket.sendall(message({"op": "settings"}, pickle.dumps(settings)))

    def serve(self, loop: ServingLoop, served: ServedModel) -> None:
        """Have it take requests for a loop; return when it does."""
        model = message({"op": "model"}, pickle.dumps(served))
        self._link = ApiLink(loop, self._socket, lru_cache(FORMS)(served.form_of), self._fate)
        self._link.start()
        self._link.send(model)
        self._link.decided.wait(START_S)
        if not self._link.stands:
            why = self._fate()
            why = f"has ended{why}" if why else f"did not start within {START_S:g} s"
            raise MegaKVError(f"the process that speaks HTTP {why}")

    def drain(self) -> None:
        """Take no more requests; safe in a signal's handler."""
        if self._link is not None:
            self._link.drain()

    def close(self) -> None:
        """End it, when what was written to clients has reached them; at once where it has not begun to serve."""
        if self._closed:
            return
        self._closed = True
        if self._link is None:
            self.process.kill()
        else:
            self._link.stop()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()
        if self._link is None:
            self._socket.close()
        else:
            self._link.close()

    def _fate(self) -> str:
        """How the process has ended, for a sentence's end."""
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(1.0)
            return f" by signal {-status}" if status < 0 else f" with status {status}"
        return ""
