"""The ranks' loop, as the process that speaks HTTP has it: requests go there, and events come from there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megakv.serving.http.errors import ApiError, unavailable
from megakv.serving.messages import (
    MOST_FROM_RANKS,
    Header,
    Messages,
    message,
    read_events,
    read_stats,
    submit_message,
)
from megakv.serving.request import Event, Finished, Request, Token
from megakv.serving.stats import Document, ServingStats, State

Stats = tuple[ServingStats, list[Document]]
GONE = "the ranks of this server have ended"


@dataclass
class Record:
    """A request that has not ended, with the tokens of its answer so far: its prompt, settings and seed are its own."""

    request: Request
    tokens: list[int] = field(default_factory=list)


class Ranks(asyncio.Protocol):
    """The other end of the socket, in an event loop. `on_end` is called when it ends, or asks to."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self.state: State = "starting"
        self.on_end = on_end
        loop = asyncio.get_running_loop()
        self.settings: asyncio.Future[bytes] = loop.create_future()
        self.model: asyncio.Future[bytes] = loop.create_future()
        """What the ranks' process begins with, as it was pickled there."""
        self._transport: asyncio.Transport | None = None
        self._messages, self._numbers = Messages(MOST_FROM_RANKS), itertools.count()
        self.records: dict[int, Record] = {}
        """Requests that have not ended, by number."""
        self._asked: dict[int, asyncio.Future[Header]] = {}
        self._stats: list[asyncio.Future[Stats]] = []

    # What clients want

    async def submit(self, request: Request) -> int:
        """Have a request taken; returns its number. An ApiError if it is refused."""
        self.check_serves()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        sent = submit_message(number, request)
        self.records[number], self._asked[number] = Record(request), answer
        self._send(sent)
        try:
            found: Header = await answer
        except asyncio.CancelledError:
            self.cancel(number)
            raise
        if "refused" not in found:
            return number
        self.check_serves()
        if found["refused"] == "now":
            raise ApiError(429, found["why"], code="queue_full", headers={"retry-after": "1"})
        code = "context_length_exceeded" if found["refused"] == "length" else "invalid_value"
        raise ApiError(400, found["why"], code=code)

    def cancel(self, number: int) -> None:
        """End a request, if it has not ended."""
        if number in self.records:
            self._send(message({"op": "cancel", "n": number}))

    async def stats(self, *, documents: bool = True) -> Stats:
        """A snapshot, with prefixes that are kept where those are asked for; an ApiError where nobody knows."""
        if self._transport is None:
            raise unavailable(GONE)
        found: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats.append(found)
        self._send(message({"op": "stats", "documents": documents}))
        return await found

    def check_serves(self) -> None:
        """An ApiError where no more requests are taken: while the server drains, and once a rank is lost."""
        if self.state in ("draining", "ended"):
            raise unavailable("the server is ending; it takes no more requests")

    def stand(self) -> None:
        """Say that requests are taken."""
        self._send(message({"op": "standing"}))

    def _send(self, content: bytes) -> None:
        if self._transport is not None:
            self._transport.write(content)

    # What comes of it

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for header, tail in self._messages.add(data):
            self._take(header, tail)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all that waits."""
        self._transport, self.state = None, "ended"
        for begin in (self.settings, self.model):
            if not begin.done():
                begin.set_exception(ConnectionError(GONE))
        for waiting in self._stats:
            if not waiting.done():
                waiting.set_exception(unavailable(GONE))
        for number in list(self._asked):
            self._taken(number, {"refused": "now", "why": GONE})
        for number in list(self.records):
            self._told(number, Finished("error", GONE))
        self.on_end()

    def _take(self, header: Header, tail: bytes) -> None:
        match header["op"]:
            case "events":
                self.state = header["state"]
                for number, event in read_events(header, tail):
                    self._told(number, event)
            case "taken":
                self._taken(header["n"], header)
            case "stats":
                if not (waiting := self._stats.pop(0)).done():
                    waiting.set_result(read_stats(header, tail))
            case "settings":
                self.settings.set_result(tail)
            case "model":
                self.model.set_result(tail)
            case "stop":
                self.on_end()

    def _taken(self, number: int, answer: Header) -> None:
        if "refused" in answer:
            self.records.pop(number, None)
        if not (asked := self._asked.pop(number)).done():
            asked.set_result(answer)

    def _told(self, number: int, event: Event) -> None:
        if (record := self.records.get(number)) is None:
            return
        if isinstance(event, Token):
            record.tokens.append(event.id)
        elif isinstance(event, Finished):
            del self.records[number]
        record.request.sink(event)
