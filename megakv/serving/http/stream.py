"""Answers on the wire, whole or as server-sent events, for as long as somebody listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Response

from megakv.serving.http.answers import Answers
from megakv.serving.http.errors import ApiError, broken
from megakv.serving.http.guard import Receive, Scope, Send

logger = logging.getLogger(__name__)

BEAT = b": still here\n\n"
"""A comment, which clients pass over."""
DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


def data(json: str) -> bytes:
    """An event."""
    return f"data: {json}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails."""
    return data(error.json().decode())


async def while_listened_to(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work comes to; an ApiError, and its end, if the client leaves before."""
    working, left = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, left}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client has left")
        return working.result()
    finally:
        for task in (working, left):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come; `chunks` come from the answers, which are asked for before anything is sent.

    What cannot even be asked is an error of its own; what fails later ends with an event that `failed` makes.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answers: Answers,
        chunks: AsyncIterator[bytes],
        failed: Callable[[ApiError], bytes],
        headers: Mapping[str, str] | None = None,
    ):
        # A proxy that collects events would make a stream of none.
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._answers, self._chunks, self._failed = answers, chunks, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def speak() -> None:
            async with self._answers:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for chunk in self._said():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        try:
            await while_listened_to(receive, speak())
        except ApiError as error:
            if error.status != 499:
                raise

    async def _said(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks:
                yield chunk
        except ApiError as error:
            yield self._failed(error)
        except Exception:
            logger.exception("a stream failed")
            yield self._failed(broken())
