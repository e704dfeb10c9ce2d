"""This process's TCP connections to other ranks, and which of them are over."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

FOLDER = "/proc/self/fd"
MARKS = (
    *("gloo/transport", "Timed out", "timed out", "Timeout", "Connection reset", "Connection closed", "Broken pipe"),
    *("ncclRemoteError", "ncclSystemError", "remote process exited", "network error", "communicator was aborted"),
)
"""What gloo and NCCL write of connections that are over, and of peers that do not answer."""
Endpoint = tuple[Any, ...]
"""Address and port of one end of a connection."""


def broke(error: BaseException) -> bool:
    """Whether an exchange failed because of a connection, or of a peer that did not answer: nothing else is a loss."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, dist.DistNetworkError | dist.DistStoreError) or any(mark in str(error) for mark in MARKS)


def own_endpoints() -> list[Endpoint]:
    """This process's ends of its TCP connections; none where the system does not list them."""
    return [own for _, own, _ in _connections()]


def open_connections() -> frozenset[str]:
    """Names of this process's TCP connections; they tell one from all others, also from later ones."""
    return frozenset(name for name, _, _ in _connections())


def shut(names: Collection[str]) -> None:
    """End these connections at both ends, whoever holds them: what waits for them fails."""
    for descriptor in _descriptors():
        if _name(descriptor) in names:
            with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
                # Looked at again: the descriptor may be another's by now. One that only listens has no peer.
                if _name(str(connection.fileno())) in names and connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)


class PeerConnections:
    """Those of the connections `names` that lead to other ranks.

    `endpoints` are what `own_endpoints` gave on every rank, once all connections stood.
    """

    def __init__(self, names: Collection[str], rank: int, endpoints: Sequence[Sequence[Endpoint]]):
        others = {end: other for other, ends in enumerate(endpoints) if other != rank for end in ends}
        self._of = {name: others[peer] for name, _, peer in _connections() if name in names and peer in others}

    def __bool__(self) -> bool:
        return len(self._of) > 0

    def over(self) -> list[int]:
        """Ranks to which a connection is over."""
        there = {_name(descriptor) for descriptor in _descriptors()}
        return sorted({rank for name, rank in self._of.items() if name not in there})


def _descriptors() -> list[str]:
    return os.listdir(FOLDER) if os.path.isdir(FOLDER) else []


def _name(descriptor: str) -> str:
    """What a descriptor stands for."""
    with suppress(OSError):
        return os.readlink(f"{FOLDER}/{descriptor}")
    return ""


def _connections() -> Iterator[tuple[str, Endpoint, Endpoint]]:
    """Name, own end and other end of every TCP connection."""
    for descriptor in _descriptors():
        name = _name(descriptor)
        if name.startswith("socket:"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    # Fails for one that only listens.
                    yield name, tuple(connection.getsockname()[:2]), tuple(connection.getpeername()[:2])
