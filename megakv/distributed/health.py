"""Connections over which ranks tell each other of failures: each has one to rank 0, which passes on what it hears.

They belong to neither gloo nor NCCL, so that they are there before either has exchanged anything, and a process that
ends is noticed whatever it did: the kernel closes its connections. A host that is gone is noticed by TCP's keepalive.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
MOST_GREETING = 100
"""Bytes of a token and a rank, and more."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""A host that does not answer is lost after half a minute."""

Message = dict[str, Any]


class HealthChannel:
    """One rank's connections for word of failures.

    On rank 0 there are `links` to every other rank, elsewhere to rank 0, but for those that could not be had. It is
    `deaf` if some rank, this one or another, could not be connected.
    """

    def __init__(self, rank: int, links: Mapping[int, socket.socket], *, deaf: bool = False):
        self._rank = rank
        self.deaf = deaf
        self._links = dict(links)
        self._rest = {peer: b"" for peer in links}
        self._sending = threading.Lock()
        self._process = os.getpid()

    @property
    def open(self) -> bool:
        """Whether anything can be heard."""
        return len(self._links) > 0

    def tell(self, message: Message, *, besides: int | None = None) -> None:
        """Send a message to all other ranks, but for the one that it came from."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            for peer, link in list(self._links.items()):
                if peer != besides:
                    # A link that is over says so when it is read.
                    with suppress(OSError):
                        link.sendall(line)

    def poll(self, seconds: float) -> list[Message]:
        """What came in, waited for at most so long."""
        with selectors.DefaultSelector() as selector:
            with self._sending:
                for peer, link in self._links.items():
                    selector.register(link, selectors.EVENT_READ, peer)
            ready = [(key.data, key.fileobj) for key, _ in selector.select(seconds)]
        return [message for peer, link in ready if peer in self._links for message in self._read(peer, link)]

    def _read(self, peer: int, link: Any) -> list[Message]:
        data = b""
        with suppress(OSError):
            data = link.recv(1 << 16)
        *lines, self._rest[peer] = (self._rest[peer] + data).split(b"\n")
        messages: list[Message] = [json.loads(line) for line in lines]
        if not data and peer in self._links:
            with self._sending:
                self._links.pop(peer, link).close()
            # It may have said before that it ends.
            messages.append({"kind": "lost", "rank": peer})
        if self._rank == 0:
            for message in messages:
                self.tell(message, besides=peer)
        return messages

    def end(self, *, lost: bool = False) -> None:
        """Say that this rank ends in good order, or that it is lost; a `poll` under way returns."""
        if os.getpid() != self._process:
            # A fork of the rank ends.
            return
        self.tell({"kind": "lost" if lost else "ended", "rank": self._rank})
        with self._sending:
            for link in self._links.values():
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connections, when nobody polls any more."""
        with self._sending:
            for link in self._links.values():
                link.close()
            self._links.clear()


def connect(
    rank: int, gather: Callable[[Any], list[Any]], *, world_size: int, hosts: Iterable[str] = ()
) -> HealthChannel:
    """Connect all ranks with rank 0. Every rank must call it.

    `gather` gives every rank what all ranks passed to it. Under `hosts` this rank may reach rank 0's, beside its name.
    """
    if world_size == 1:
        return HealthChannel(rank, {})
    listener = listen(world_size) if rank == 0 else None
    offer = None if listener is None else (listener.getsockname()[1], secrets.token_hex(16), socket.gethostname())
    port, token, name = gather(offer)[0]
    link = None if rank == 0 else reach([*hosts, name], port, f"{token} {rank}\n".encode())
    reached = [other for other, success in enumerate(gather(link is not None)) if success]
    deaf = len(reached) < world_size - 1
    if listener is None:
        return HealthChannel(rank, {} if link is None else {0: link}, deaf=deaf)
    with listener:
        links = accept_links(listener, token, len(reached))
    if missing := sorted(set(range(1, world_size)) - links.keys()):
        logger.warning(
            "no connection from rank %s to port %d of this host: that one of them is lost is noticed by what waits "
            "for it alone",
            ", ".join(map(str, missing)),
            port,
        )
    return HealthChannel(rank, links, deaf=deaf)


def listen(world_size: int) -> socket.socket:
    """A port of all of this host's addresses."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=world_size, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=world_size)


def reach(hosts: Iterable[str], port: int, greeting: bytes) -> socket.socket | None:
    """A connection to the first of some hosts that takes one, by which it has been greeted."""
    for host in dict.fromkeys(hosts):
        with suppress(OSError):
            link = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
            link.sendall(greeting)
            return _kept_alive(link)
    return None


def accept_links(listener: socket.socket, token: str, expected: int) -> dict[int, socket.socket]:
    """The links of so many ranks, which have all connected; whoever does not know the token is none.

    All greetings are read side by side and within one time, so that nobody waits for a stranger's.
    """
    links: dict[int, socket.socket] = {}
    deadline = time.monotonic() + CONNECT_SECONDS
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        greetings: dict[socket.socket, bytes] = {}
        while len(links) < expected and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                link: Any = key.fileobj
                if link is listener:
                    with suppress(OSError):
                        link, _ = listener.accept()
                        link.setblocking(False)
                        selector.register(link, selectors.EVENT_READ)
                        greetings[link] = b""
                    continue
                data = b""
                with suppress(OSError):
                    # Behind the greeting there may be a message already.
                    data = link.recv(1)
                greetings[link] += data
                if data and data != b"\n" and len(greetings[link]) < MOST_GREETING:
                    continue
                selector.unregister(link)
                given, _, rank = greetings.pop(link).decode(errors="replace").strip().partition(" ")
                if secrets.compare_digest(given.encode(), token.encode()):
                    links[int(rank)] = _kept_alive(link)
                else:
                    link.close()
        for link in greetings:
            link.close()
    return links


def _kept_alive(link: socket.socket) -> socket.socket:
    link.settimeout(CONNECT_SECONDS)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        # Not every system has all of them.
        if hasattr(socket, option):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return link
