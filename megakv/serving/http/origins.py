"""Pages of other sites that may ask, where a server allows any; and paths that end with a slash."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megakv.serving.http.guard import App, Message, Receive, Scope, Send

METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
HEADERS = (
    b"authorization, content-type, openai-organization, openai-project, x-api-key, x-request-id, "
    b"x-stainless-arch, x-stainless-async, x-stainless-lang, x-stainless-os, x-stainless-package-version, "
    b"x-stainless-helper-method, x-stainless-poll-helper, x-stainless-retry-count, x-stainless-runtime, "
    b"x-stainless-runtime-version, x-stainless-timeout, anthropic-version, anthropic-beta, "
    b"anthropic-dangerous-direct-browser-access"
)
"""Those that OpenAI's and Anthropic's libraries send from a page."""
CACHED_S = b"600"
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Origins:
    """Middleware: browsers are told which origins may read answers; the application behind it decides who gets any."""

    app: App
    allowed: tuple[str, ...]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["path"]) > 1 and scope["path"].endswith("/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
        origin = _header(scope.get("headers", ()), b"origin")
        if scope["type"] != "http" or not self.allowed or origin is None:
            await self.app(scope, receive, send)
            return
        more: Headers = [(b"vary", b"origin")]
        named = ("*", origin.decode("latin-1"))
        if known := next((each for each in self.allowed if each in named), None):
            more.append((b"access-control-allow-origin", known.encode()))
        if scope["method"] == "OPTIONS" and _header(scope["headers"], b"access-control-request-method") is not None:
            # A browser asks so without a key, and before it sends anything.
            if known:
                more += [(b"access-control-allow-methods", METHODS), (b"access-control-allow-headers", HEADERS)]
                more.append((b"access-control-max-age", CACHED_S))
            await send({"type": "http.response.start", "status": 204 if known else 403, "headers": more})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        await self.app(scope, receive, send_with)


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    return next((value for found, value in headers if found == name), None)
