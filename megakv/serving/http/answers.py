"""Answers to a call, as text, from the events of the serving loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megakv.serving.http.answer_text import AnswerText
from megakv.serving.http.call import Call, ServedModel
from megakv.serving.http.errors import ApiError, unavailable
from megakv.serving.http.parts import Contents, Detokenizer
from megakv.serving.http.ranks import Ranks
from megakv.serving.request import Event, Finished, Progress, Request, Scored, Token

MOST_EVENTS = 4096
"""Of one call that wait for a client that does not read; then it is taken to be gone."""


class Channel:
    """Events of the answers to one call, each with the number of its answer, in the event loop."""

    def __init__(self, most: int = MOST_EVENTS) -> None:
        self._most, self._closed = most, False
        self._events: list[tuple[int, Event]] = []
        self._ready = asyncio.Event()

    def add(self, index: int, event: Event) -> None:
        """Add an event. Of progress, the last alone is of interest; beyond the bound, all are given up."""
        if self._closed:
            return
        if isinstance(event, Progress) and self._events and isinstance(self._events[-1][1], Progress):
            self._events.pop()
        if len(self._events) >= self._most:
            self._events.clear()
            event = Finished("error", "the client does not read what was asked for")
            self._closed = True
        self._events.append((index, event))
        self._ready.set()

    async def take(self, seconds: float) -> list[tuple[int, Event]]:
        """All events that have come, once there are any; none where none came for so long."""
        with suppress(TimeoutError):
            # Unlike `wait_for` it makes no task, for every token of every stream.
            async with asyncio.timeout(seconds):
                await self._ready.wait()
        self._ready.clear()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Take no more."""
        self._closed = True
        self._events.clear()


BEAT_S = 10.0
"""After so long without news a stream shows that it lives."""


@dataclass
class Piece:
    """What an answer has more; the last one says why it ended."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    stopped: str | None = None
    """The stop string that ended it, where one did."""


@dataclass
class Usage:
    """What was read and written."""

    prompt_tokens: int
    cached_tokens: int = 0
    new_tokens: int = 0


@dataclass
class _Answer:
    """One of them, as far as it has come."""

    request: Request
    text: AnswerText
    number: int | None = None
    """By which the ranks have it, once it was asked for."""
    cached: int = 0
    done: bool = False
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    scores: list[Token] = field(default_factory=list)
    """The prompt's tokens but for the first, where their log probabilities were asked for."""


Timed = Callable[[float, float | None], None]
"""Is told an answer's TTFT, and its mean time per further token, when it ends."""


class Answers:
    """All answers to one call; in an ``async with``, whose end cancels those that have not ended.

    The first answer to each prompt is asked for at once, the others when the prompt was read: they find it kept.
    """

    def __init__(
        self,
        ranks: Ranks,
        served: ServedModel,
        call: Call,
        timed: Timed,
        contents: Callable[[], Contents | None] = lambda: None,
    ):
        """`contents` says of each answer where its content is, in which alone stops are looked for."""
        self._ranks, self._call, self._timed = ranks, call, timed
        self._channel = Channel()
        self._began = time.monotonic()
        self._stop_texts = _stop_tokens(served, call.stops)
        self.usage = Usage(sum(map(len, call.prompts)))
        self._answers = [
            _Answer(request, _text(served, call, request, contents()))
            for request in call.requests(uuid.uuid4().hex, self._channel.add)
        ]

    @property
    def count(self) -> int:
        """How many answers there will be."""
        return len(self._answers)

    async def __aenter__(self) -> Answers:
        try:
            for answer in self._answers[:: self._call.n]:
                await self._submit(answer)
        except BaseException:
            self._cancel()
            raise
        return self

    async def __aexit__(self, *ending: object) -> None:
        self._cancel()

    async def pieces(self) -> AsyncIterator[Piece | Progress | None]:
        """As they come, a client that reads slowly gets more at a time; None every `BEAT_S` without any."""
        while not all(answer.done for answer in self._answers):
            progress: Progress | None = None
            found: dict[int, Piece] = {}
            events = await self._channel.take(BEAT_S)
            if not events:
                yield None
            for index, event in events:
                if isinstance(event, Scored):
                    self._answers[index].scores += event.tokens
                elif isinstance(event, Progress):
                    if index % self._call.n == 0:
                        progress = self._read(index, event)
                elif not self._answers[index].done:
                    await self._add(found.setdefault(index, Piece(index)), event)
            if progress is not None:
                yield progress
            for piece in found.values():
                if piece.text or piece.tokens or piece.finish:
                    yield piece

    async def whole(self) -> list[Piece]:
        """All answers, asked for and waited for."""
        found = [Piece(index) for index in range(self.count)]
        async with self:
            async for piece in self.pieces():
                if isinstance(piece, Piece):
                    answer = found[piece.index]
                    answer.text += piece.text
                    answer.tokens += piece.tokens
                    answer.finish, answer.stopped = piece.finish, piece.stopped
        return found

    def prompt(self, index: int) -> list[Token]:
        """The prompt of an answer that has begun, with log probabilities where they were asked for."""
        first = self._answers[index - index % self._call.n]
        ids = first.request.prompt
        return [Token(ids[0]), *first.scores] if first.scores else [Token(token) for token in ids]

    def progress(self, progress: Progress) -> dict[str, Any]:
        """How far a prompt was read, as llama.cpp says it, and which rank holds how much of it."""
        spent = int((time.monotonic() - self._began) * 1e3)
        found = {"total": progress.total, "cache": progress.cached, "processed": progress.read, "time_ms": spent}
        return found | ({"ranks": progress.ranks} if progress.ranks else {})

    def _read(self, index: int, event: Progress) -> Progress:
        """Note what was found, which grows while it comes from disk."""
        answer = self._answers[index]
        self.usage.cached_tokens += event.cached - answer.cached
        answer.cached = event.cached
        return event

    async def _add(self, piece: Piece, event: Event) -> None:
        answer = self._answers[piece.index]
        if isinstance(event, Token):
            answer.last_s = time.monotonic()
            answer.first_s = answer.first_s or answer.last_s
            answer.tokens += 1
            self.usage.new_tokens += 1
            # As with ends, no stop is looked for among the first.
            free = answer.tokens <= answer.request.sampling.min_tokens
            ends = event.id in self._stop_texts and not free
            if event.id not in self._call.silent_ids and (not ends or self._call.shows_stops):
                self._say(piece, answer.text.add(event, free=free or ends))
            if ends:
                self._say(piece, answer.text.stop(self._stop_texts[event.id]))
            if answer.text.stopped:
                self._stop(answer)
                self._end(piece, "stop")
            await self._submit_others(piece.index)
        elif isinstance(event, Finished):
            if event.why == "error":
                raise ApiError(500, event.message or "the answer failed", code="failed")
            if event.why == "cancelled":
                raise unavailable(event.message or "the answer was cancelled")
            self._say(piece, answer.text.end())
            self._end(piece, "stop" if answer.text.stopped else event.why)
            await self._submit_others(piece.index)

    def _say(self, piece: Piece, more: tuple[str, list[Token]]) -> None:
        piece.text += more[0]
        piece.tokens += more[1]

    def _end(self, piece: Piece, why: str) -> None:
        answer = self._answers[piece.index]
        answer.done, piece.finish, piece.stopped = True, why, answer.text.found
        if answer.first_s is not None:
            per_token = (answer.last_s - answer.first_s) / (answer.tokens - 1) if answer.tokens > 1 else None
            self._timed(answer.first_s - self._began, per_token)

    async def _submit_others(self, index: int) -> None:
        if self._call.n == 1:
            return
        first = index - index % self._call.n
        for answer in self._answers[first : first + self._call.n]:
            if answer.number is None:
                await self._submit(answer)

    async def _submit(self, answer: _Answer) -> None:
        answer.number = await self._ranks.submit(answer.request)

    def _stop(self, answer: _Answer) -> None:
        if answer.number is not None:
            self._ranks.cancel(answer.number)

    def _cancel(self) -> None:
        self._channel.close()
        for answer in self._answers:
            if not answer.done:
                answer.done = True
                self._stop(answer)


def _text(served: ServedModel, call: Call, request: Request, contents: Contents | None) -> AnswerText:
    return AnswerText(_detokenizer(served, call, request), call.stops, contents, shown=call.shows_stops)


def _detokenizer(served: ServedModel, call: Call, request: Request) -> Detokenizer:
    behind = request.prompt if call.continues else ()
    return Detokenizer(served.tokenizer, special=call.special, behind=behind)


def _stop_tokens(served: ServedModel, stops: Sequence[str]) -> dict[int, str]:
    """Special tokens that are a stop: they may be no part of the text, or of no content."""
    tokenizer = served.tokenizer
    special = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if stops and token.special}
    return {special[stop]: stop for stop in stops if stop in special}
