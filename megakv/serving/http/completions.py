"""``/v1/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from openai.types import Completion, CompletionChoice

from megakv.serving.http.answers import Answers, Piece
from megakv.serving.http.chat import openai_usage, prompt_progress
from megakv.serving.http.logprobs import completion_logprobs
from megakv.serving.http.schemas import CompletionBody
from megakv.serving.http.served_model import ServedModel
from megakv.serving.http.stream import BEAT, DONE, data, error_event
from megakv.serving.request import Progress


class CompletionAnswer:
    """Writes the answers to one call of the endpoint."""

    failed = staticmethod(error_event)

    def __init__(self, served: ServedModel, body: CompletionBody, answers: Answers):
        self._served, self._body, self._answers = served, body, answers
        self._id, self._created, self._began = f"cmpl-{uuid.uuid4().hex}", int(time.time()), time.monotonic()
        self._letters = [0] * answers.count

    async def whole(self) -> Completion:
        """All answers in one object."""
        found = [Piece(index) for index in range(self._answers.count)]
        async with self._answers:
            async for piece in self._answers.pieces():
                if isinstance(piece, Piece):
                    answer = found[piece.index]
                    answer.text += piece.text
                    answer.tokens += piece.tokens if self._body.logprobs is not None else []
                    answer.finish = piece.finish
        return self._object([self._choice(piece) for piece in found], usage=openai_usage(self._answers.usage))

    async def events(self) -> AsyncIterator[bytes]:
        """The answers as they come."""
        options = self._body.stream_options
        running = options is not None and options.continuous_usage_stats
        async for piece in self._answers.pieces():
            if piece is None:
                yield BEAT
            elif isinstance(piece, Progress):
                if self._body.return_progress:
                    yield self._event([], prompt_progress=prompt_progress(piece, self._began))
            else:
                more = {"usage": openai_usage(self._answers.usage)} if running else {}
                yield self._event([self._choice(piece)], **more)
        if options is not None and options.include_usage:
            yield self._event([], usage=openai_usage(self._answers.usage))
        yield DONE

    def _choice(self, piece: Piece) -> CompletionChoice:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = completion_logprobs(self._served.tokenizer, piece.tokens, self._letters[piece.index])
        self._letters[piece.index] += len(piece.text)
        # Of a part there is no reason yet, which the type does not know.
        end: Any = piece.finish
        return CompletionChoice.model_construct(
            index=piece.index, text=piece.text, finish_reason=end, logprobs=logprobs
        )

    def _object(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        return Completion.model_construct(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._served.name,
            choices=choices,
            **more,
        )

    def _event(self, choices: list[CompletionChoice], **more: Any) -> bytes:
        return data(self._object(choices, **more).model_dump_json(exclude_unset=True))
