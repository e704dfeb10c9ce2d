"""The socket on which the server listens."""

from __future__ import annotations

import errno
import resource
import socket

from megakv.serving.http.settings import HttpSettings

SEND_BYTES = 256 << 10
OTHER_FILES = 256
"""Files that a rank has open beside clients' connections."""


def listening_socket(settings: HttpSettings) -> socket.socket:
    """Where the server listens; a ValueError where it cannot."""
    _allow_files(settings.max_connections)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # What the kernel holds for a client that reads slowly is bounded too.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
            # The kernel gives up connections whose clients take nothing: what was written to them would stay for ever.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2e3 * settings.stall_s))
            listener.bind(address)
            listener.listen(settings.max_connections)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        taken = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = "another port, or 0 for any that is free" if taken else "an address of this host, or its name"
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"--host {settings.host} --port {settings.port}: cannot listen there: {why}; give {advice}"
        ) from error
    return listener


def _allow_files(connections: int) -> None:
    """Raise this process's limit of open files where that is needed; a ValueError where it cannot be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_FILES
    if needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"--max-connections {connections}: this process may have {hard} files open (ulimit -Hn), of which "
            f"{OTHER_FILES} are the server's own; allowed: up to {max(hard - OTHER_FILES, 0)}, or more after raising "
            "that limit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
