"""The HTTP server: uvicorn's, and its protocol with bounds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megakv.serving.http.app import Service
from megakv.serving.http.call import ServedModel
from megakv.serving.http.errors import ApiError, unavailable
from megakv.serving.http.guard import App, Guard, Receive, Scope, Send
from megakv.serving.http.metrics import Metrics
from megakv.serving.http.origins import Origins
from megakv.serving.http.ranks import Ranks
from megakv.serving.http.settings import HttpSettings

LINGER_S = 2.0
"""How long a closed connection still takes what a client sends: else the client might not read the last answer."""


class LingeringTransport:
    """A transport whose end is first said to the client; what comes until the client ends too is thrown away."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop):
        self._transport, self._loop = transport, loop
        self._closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is to be sent."""
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        """Send what was written, and nothing more."""
        if not self.is_closing():
            self._closing = True
            with suppress(RuntimeError, OSError):
                self._transport.write_eof()
                self._transport.resume_reading()
            self._loop.call_later(LINGER_S, self._transport.close)


def limited_protocol(*, most: int, stall_s: float) -> type[H11Protocol]:
    """The protocol of a server that has so many connections at most, and waits so long for a request's first lines."""

    class LimitedProtocol(H11Protocol):
        """One connection."""

        _headers_due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(LingeringTransport(transport, self.loop))  # type: ignore[arg-type]
            if len(self.connections) > most:
                self._refuse(unavailable(f"the server has {most} connections, its most; try again later"))
            else:
                self._headers_due = self.loop.call_later(stall_s, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if not self.transport.is_closing():
                super().data_received(data)
                if self.cycle is not None and not self.cycle.response_complete:
                    self._stop_waiting()
                elif self._headers_due is None:
                    # Between two requests the keep-alive time is over with a request's first byte.
                    self._headers_due = self.loop.call_later(stall_s, self._give_up)

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, "this is not an HTTP request that can be read", code="invalid_http"))

        def _stop_waiting(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None

        def _give_up(self) -> None:
            self._headers_due = None
            if not self.transport.is_closing():
                self._refuse(ApiError(408, f"no request came within {stall_s:g} s", code="timeout"))

        def _refuse(self, error: ApiError) -> None:
            """Before there is a request: nothing but the wire to write to."""
            self._stop_waiting()
            body = error.json()
            head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.close()

    return LimitedProtocol


LONGEST_LINES = 64 << 10
"""Bytes of a request's first lines, beyond which it is not read to its end."""
FAREWELL_S = 10.0
"""How long clients may take to read the end of their answers when the server ends."""


class _Server(uvicorn.Server):
    """One that leaves signals alone: whoever started this process says when it ends."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Answers in an event loop until `end`; until `open`, that the model is being loaded."""

    def __init__(self, settings: HttpSettings, listener: socket.socket):
        self._settings, self._listener = settings, listener
        self._metrics = Metrics()
        self._app: App | None = None
        protocol = limited_protocol(most=settings.max_connections, stall_s=settings.stall_s)
        config = uvicorn.Config(
            Origins(Guard(self._answer, settings, self._metrics.count), settings.origins),
            http=protocol,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=LONGEST_LINES,
            timeout_graceful_shutdown=int(FAREWELL_S),
        )
        self._server = _Server(config)

    def open(self, ranks: Ranks, served: ServedModel) -> None:
        """Take requests for a model."""
        self._app = Service(ranks, served, self._settings, self._metrics).app()

    def end(self) -> None:
        """End, when what was written to clients has reached them."""
        self._server.should_exit = True

    async def serve(self) -> None:
        """Answer."""
        await self._server.serve([self._listener])

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            raise unavailable("the model is being loaded")
        await self._app(scope, receive, send)
