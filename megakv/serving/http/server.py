"""The HTTP server of rank 0: a thread of its own beside the one that computes."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress

import uvicorn

from megakv.base.errors import MegaKVError
from megakv.serving.http.app import Service
from megakv.serving.http.guard import Guard
from megakv.serving.http.metrics import Metrics
from megakv.serving.http.protocol import limited_protocol
from megakv.serving.http.served_model import ServedModel
from megakv.serving.http.settings import HttpSettings
from megakv.serving.loop import ServingLoop

LONGEST_LINES = 64 << 10
"""Bytes of a request's first lines, beyond which it is not read to its end."""
FAREWELL_S = 10.0
"""How long clients may take to read the end of their answers when the server ends."""
START_S = 30.0


class HttpServer:
    """Serves in a thread from `start` to `stop`."""

    def __init__(self, loop: ServingLoop, served: ServedModel, settings: HttpSettings, listener: socket.socket):
        self._loop, self._listener = loop, listener
        metrics = Metrics(loop.stats)
        self._service = Service(loop, served, settings, metrics)
        protocol = limited_protocol(most=settings.max_connections, stall_s=settings.stall_s)
        config = uvicorn.Config(
            Guard(self._service.app(), settings, metrics.count),
            http=protocol,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=LONGEST_LINES,
            timeout_graceful_shutdown=int(FAREWELL_S),
        )
        self._server = uvicorn.Server(config)
        self._events: asyncio.AbstractEventLoop | None = None
        self._standing, self._stops = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="megakv-http", daemon=True)

    def prepare(self) -> None:
        """Begin to make ready for long requests, so that the first of them need not wait."""
        self._service.work.start()

    def start(self) -> None:
        """Return when requests are taken."""
        self._thread.start()
        if not self._standing.wait(START_S):
            raise MegaKVError(f"the HTTP server did not start within {START_S:g} s")

    def drain(self) -> None:
        """Take no more requests; safe in a signal's handler, and as often as one likes."""
        if self._events is not None:
            # After its end there is nothing to drain.
            with suppress(RuntimeError):
                self._events.call_soon_threadsafe(self._loop.drain)

    def stop(self) -> None:
        """End, when what was written to clients has reached them."""
        self._stops = self._server.should_exit = True
        self._thread.join(2 * FAREWELL_S)
        self._service.work.close()

    def _run(self) -> None:
        async def serve() -> None:
            self._events = asyncio.get_running_loop()
            self._standing.set()
            await self._server.serve([self._listener])

        why = "without an error"
        try:
            asyncio.run(serve())
        except BaseException as error:
            why = f"with {type(error).__name__}: {error}"
            raise
        finally:
            if not self._stops:
                self._loop.fail(f"the thread that speaks HTTP has ended {why}")
