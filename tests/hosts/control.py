"""Rate limits changed from inside a host, so that ranks can take measurements at several rates in turn."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

VARIABLE = "MEGAKV_HOSTS_CONTROL"
"""Environment variable that names the socket on every host."""

ANSWER_S = 30.0


def ask_rate(rate: str) -> None:
    """Set the rate of all links, from a process on any of the hosts; returns when it holds.

    Raises
    ------
    RuntimeError
        If this process is not on such a host.
    ValueError
        If the rate is not one.
    """
    path = os.environ.get(VARIABLE)
    if path is None:
        raise RuntimeError(f"{VARIABLE} is not set: this process does not run on a host that scripts/hosts.py made")
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(ANSWER_S)
        link.connect(path)
        link.sendall(f"{rate}\n".encode())
        answer = link.makefile().readline().strip()
    if answer != "ok":
        raise ValueError(answer)


class ControlServer:
    """Answers `ask_rate`. A path in the file system reaches every host, whatever its network.

    Parameters
    ----------
    path : Path
        Of the socket, 100 characters at most.
    set_rate : callable
        Called with the rate, one call at a time.
    """

    def __init__(self, path: Path, set_rate: Callable[[str], None]):
        self._set_rate = set_rate
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            with link:
                try:
                    link.settimeout(ANSWER_S)
                    self._set_rate(link.makefile().readline().strip())
                    answer = "ok"
                except (ValueError, RuntimeError, OSError) as error:
                    answer = " ".join(str(error).split())
                try:
                    link.sendall(f"{answer}\n".encode())
                except OSError:
                    continue

    def close(self) -> None:
        """Stop answering. May be called again."""
        try:
            # Wakes the thread, which closing alone does not.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._thread.join()
        self._socket.close()
