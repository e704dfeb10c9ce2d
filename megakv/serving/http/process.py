"""``python -m megakv.serving.http.process SOCKET LISTENER``: speaks HTTP beside rank 0, and ends when that does."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import socket
import sys
import traceback

from megakv.serving.http.call import ServedModel
from megakv.serving.http.ranks import Ranks
from megakv.serving.http.server import HttpServer


async def connect(connection: socket.socket) -> Ranks:
    """The ranks at the other end of a socket."""
    _, ranks = await asyncio.get_running_loop().create_unix_connection(Ranks, sock=connection)
    return ranks


async def _serve(ranks: Ranks, server: HttpServer) -> None:
    """Answer until the ranks ask for the end, or are gone; with a model from when they have sent one on."""
    ranks.on_end = server.end
    answering = asyncio.create_task(server.serve())
    try:
        served: ServedModel = pickle.loads(await ranks.model)
    except ConnectionError:
        server.end()
    else:
        # To look through a vocabulary takes a tenth of a second: once, before there are streams.
        _ = served.reader.longest_token
        server.open(ranks, served)
        # What is there by now stays: looking through it took 50 ms, in which no stream had a token.
        gc.freeze()
        ranks.stand()
    await answering


async def _run(connection: socket.socket, listener: socket.socket) -> None:
    ranks = await connect(connection)
    try:
        settings = pickle.loads(await ranks.settings)
    except ConnectionError:
        return
    await _serve(ranks, HttpServer(settings, listener))


def main() -> None:
    """Entry of the process."""
    # Asked to end is rank 0, whose end is this process's.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    status = 0
    try:
        asyncio.run(_run(*(socket.socket(fileno=int(number)) for number in sys.argv[1:])))
    except Exception:
        traceback.print_exc()
        status = 1
    # Nobody waits for prompts whose clients have left.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
