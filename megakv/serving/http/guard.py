"""Before any work: who asks, how much is sent, and for how long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from megakv.serving.http.errors import ApiError, speaks_anthropic, unavailable
from megakv.serving.http.settings import HttpSettings, names_this_machine

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = {(method, path) for method in ("GET", "HEAD") for path in ("/", "/health", "/ping")} | {("POST", "/load_model")}
"""What needs no key: the page itself, whether the server lives, and what transformers' client asks without one."""
LAST = {"connection": "close"}
"""Of an answer before a body was read."""
MOST_BODIES = 16
"""Of the largest size, those of all requests under way may be together."""


@dataclass
class Guard:
    """Middleware: an application behind it sees only requests that are in bounds, and clients that read and send."""

    app: App
    settings: HttpSettings
    count: Callable[[str, int], None]
    """Is told the path and the status of every answer."""
    _held: int = 0
    """Bytes of bodies whose requests have not ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = self._counted(scope, send)
        length = _length(scope)
        try:
            if length is not None and _all(scope["headers"], b"transfer-encoding"):
                # Something before this server may have gone by the one where h11 goes by the other.
                message = "a request has Content-Length or Transfer-Encoding; leave one of the two out"
                raise ApiError(400, message, code="invalid_http", headers=LAST)
            scope["key"] = self._admitted(scope)
            if length is not None and length > self.settings.max_body_bytes:
                raise self._too_large()
        except ApiError as error:
            # Of a body that comes nevertheless nothing is kept.
            await respond(error, scope, send)
            return
        started, complete, taken = False, False, [0]

        async def bounded_send(message: Message) -> None:
            nonlocal started, complete
            started = True
            # One who reads nothing holds memory; what waits for the loop is bounded elsewhere.
            async with asyncio.timeout(self.settings.stall_s):
                await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self.app(scope, self._bounded(receive, taken), bounded_send)
        except ApiError as error:
            if not started:
                await respond(error, scope, send)
        except TimeoutError:
            # To end with an error would be written down as one of the server's.
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception:
            # The application answers before it raises; uvicorn would close the connection on the client's next request.
            if not complete:
                raise
            logger.exception("a request failed")
        finally:
            self._held -= taken[0]

    def _counted(self, scope: Scope, send: Send) -> Send:
        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The application notes which of its paths it took; others may be of any number.
                self.count(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        return counted_send

    def _admitted(self, scope: Scope) -> int | None:
        """Whose key a request has."""
        settings, headers = self.settings, scope["headers"]
        size = (
            sum(len(name) + len(value) for name, value in headers) + len(scope["raw_path"]) + len(scope["query_string"])
        )
        if size > settings.max_header_bytes:
            message = f"address and headers have {size} bytes; allowed: {settings.max_header_bytes}"
            raise ApiError(431, message, code="headers_too_large")
        if settings.local and not names_this_machine(_all(headers, b"host")):
            # A page of another site may have made its own name mean this machine.
            raise ApiError(403, "this server answers to requests for localhost alone", code="wrong_host")
        if not settings.keys.digests or (scope["method"], scope["path"]) in OPEN:
            return None
        kind, _, given = next(iter(_all(headers, b"authorization")), "").partition(" ")
        owner = settings.keys.owner(given.strip()) if kind.lower() == "bearer" else None
        if owner is None:
            # Clients of Anthropic's have a header of their own for it.
            owner = settings.keys.owner(next(iter(_all(headers, b"x-api-key")), "").strip())
        if owner is None:
            message = "give an API key of this server as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return owner

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self.settings.max_body_bytes} bytes, the most that is read"
        return ApiError(413, message, code="body_too_large", headers=LAST)

    def _bounded(self, receive: Receive, taken: list[int]) -> Receive:
        """Receives no more than the limit, and waits for the next part only so long; notes how much it took."""
        complete = False

        async def bounded_receive() -> Message:
            nonlocal complete
            if complete:
                # Of whoever waits for an answer there is nothing to hear but that it left.
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self.settings.stall_s)
            except TimeoutError:
                raise ApiError(408, "the body did not come in time", code="timeout", headers=LAST) from None
            more = len(message.get("body", b""))
            taken[0] += more
            self._held += more
            complete = not message.get("more_body", False)
            if taken[0] > self.settings.max_body_bytes:
                raise self._too_large()
            if self._held > MOST_BODIES * self.settings.max_body_bytes:
                raise unavailable("the requests under way are too large for one more; try again later", LAST)
            return message

        return bounded_receive


async def respond(error: ApiError, scope: Scope, send: Send) -> None:
    """Answer with an error object."""
    body = error.json(anthropic=speaks_anthropic(scope["path"]))
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _all(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for found, value in headers if found == name]


def _length(scope: Scope) -> int | None:
    """What a request says of its body's length; h11 has seen that it is a number."""
    values = _all(scope["headers"], b"content-length")
    return int(values[0]) if values else None
