"""A process that forks one for each long piece of work: it has the tokenizer and one thread, so that a fork is cheap.

``python -m megakv.serving.http.prompt_process CONTROL READER``: CONTROL is a socket over which connections come,
READER a file with the `PromptReader`. Over each connection comes the fork's process id, however far the fork is; then
the fork takes a piece of work and sends what it comes to. All of them end when the control's other end does.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

from megakv.serving.http import response_schemas  # noqa: F401 - bodies of all kinds are there before the first fork
from megakv.serving.http.errors import ApiError
from megakv.serving.http.prompt_reader import PromptReader

LENGTH_BYTES = 8
NICENESS = 5
"""Streams come first where there are few cores."""


def main() -> None:
    """Fork for every connection that comes."""
    control, file = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    with open(f"/proc/self/fd/{file}", "rb") as stored:
        reader: PromptReader = pickle.load(stored)
    os.close(file)
    # Nobody asks how a fork ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    while True:
        said, connections, _, _ = socket.recv_fds(control, 1, 1)
        if not said:
            # Of this process and its forks, which are a group.
            os.killpg(0, signal.SIGKILL)
        with socket.socket(fileno=connections[0]) as link, suppress(ConnectionError):
            fork = os.fork()
            if fork == 0:
                control.close()
                _work(link, reader)
            link.sendall(fork.to_bytes(LENGTH_BYTES))


def _work(link: socket.socket, reader: PromptReader) -> None:
    """Do one piece of work, and end."""
    os.nice(NICENESS)
    try:
        name, values = pickle.loads(_receive(link))
        if content := _receive(link):
            values = (*values, content)
        found: Any
        try:
            found = (True, getattr(reader, name)(*values))
        except ApiError as error:
            found = (False, (error.status, error.message, error.code, error.param))
        del values, content
        answer = pickle.dumps(found, pickle.HIGHEST_PROTOCOL)
        link.sendall(len(answer).to_bytes(LENGTH_BYTES))
        link.sendall(answer)
    except ConnectionError:
        # Whoever asked has left.
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _receive(link: socket.socket) -> bytearray:
    length = int.from_bytes(_received(link, LENGTH_BYTES))
    return _received(link, length)


def _received(link: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        count = link.recv_into(view)
        if not count:
            raise ConnectionError
        view = view[count:]
    return content


if __name__ == "__main__":
    main()
