"""Answers on the wire, whole or as server-sent events, for as long as somebody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Response

from megakv.serving.http.answers import Answers
from megakv.serving.http.errors import ApiError
from megakv.serving.http.guard import Receive, Scope, Send

BEAT = b": still here\n\n"
"""A comment, which clients pass over."""
DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


def data(json: str) -> bytes:
    """An event."""
    return f"data: {json}\n\n".encode()


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

    What cannot even be asked is an error of its own; what fails later is the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, chunks: AsyncIterator[bytes], *, headers: dict[str, str] | None = None):
        # A proxy that collects events would make a stream of none.
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._answers, self._chunks = answers, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def speak() -> None:
            async with self._answers:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    async for chunk in self._chunks:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                except ApiError as error:
                    chunk = data(error.json().decode())
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        try:
            await while_listened_to(receive, speak())
        except ApiError as error:
            if error.status != 499:
                raise
