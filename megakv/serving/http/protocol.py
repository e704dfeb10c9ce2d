"""HTTP on the wire: uvicorn's protocol, with errors as JSON, a bound on connections and on idle ones."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from megakv.serving.http.errors import ApiError, unavailable

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

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before:
                self._stop_waiting()

        def data_received(self, data: bytes) -> None:
            if not self.transport.is_closing():
                super().data_received(data)
                # Between two requests the keep-alive time is over with a request's first byte.
                if self._headers_due is None and (self.cycle is None or self.cycle.response_complete):
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
