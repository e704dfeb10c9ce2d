"""Answers of ``/v1/messages``: blocks of text, thinking and calls of tools, as Anthropic's clients read them."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic import BaseModel

from megakv.serving.http.answers import Answers, Piece
from megakv.serving.http.anthropic_schemas import MessagesBody
from megakv.serving.http.blocks import Block, Blocks, News, Step
from megakv.serving.http.errors import ApiError
from megakv.serving.http.parts import Parts
from megakv.serving.http.schemas import whole_letters
from megakv.serving.request import Progress


class MessageObject(BaseModel):
    """A whole answer."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, int]
    omitted_tools: list[str]


class MessageAnswer:
    """Writes the answer to one call, whole or as it comes."""

    def __init__(self, body: MessagesBody, answers: Answers, parts: Parts):
        self._body, self._answers, self._parts = body, answers, parts
        self._name = f"msg_{uuid.uuid4().hex[:24]}"
        self._blocks = Blocks()
        self._finish: str | None = None
        self._stopped: str | None = None

    async def whole(self) -> MessageObject:
        """The answer in one object."""
        for piece in await self._answers.whole():
            list(self._taken(piece))
        return self._message()

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as it comes."""
        begun = False
        async for piece in self._answers.pieces():
            if not begun:
                # By now it is known how much of the prompt was found.
                begun = True
                yield _event("message_start", message=self._message().model_dump())
                yield _event("ping")
            if piece is None:
                yield _event("ping")
            elif isinstance(piece, Progress):
                if self._body.return_progress:
                    yield _event("ping", prompt_progress=self._answers.progress(piece))
            else:
                for event in self._taken(piece):
                    yield event
        ending = {"stop_reason": self._stop_reason, "stop_sequence": self._stopped}
        yield _event("message_delta", delta=ending, usage=self._usage())
        yield _event("message_stop")

    @staticmethod
    def failed(error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return f"event: error\ndata: {error.json(anthropic=True).decode()}\n\n".encode()

    def _taken(self, piece: Piece) -> Iterator[bytes]:
        """Events of what a piece adds."""
        for part in self._parts.add(piece.text, last=piece.finish is not None):
            yield from map(_news, self._blocks.add(part))
        if piece.finish is not None:
            self._finish, self._stopped = piece.finish, piece.stopped
            yield from map(_news, self._blocks.end())

    @property
    def _stop_reason(self) -> str | None:
        if self._finish is None:
            return None
        if self._finish == "length":
            return "max_tokens"
        if self._stopped is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.calls else "end_turn"

    def _usage(self) -> dict[str, int]:
        """Tokens that were found are not among those that were read."""
        usage = self._answers.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.new_tokens,
        }

    def _message(self) -> MessageObject:
        return MessageObject(
            id=self._name,
            type="message",
            role="assistant",
            model=self._body.model or "",
            content=[_block(block, _arguments(block)) for block in self._blocks.all],
            stop_reason=self._stop_reason,
            stop_sequence=self._stopped,
            usage=self._usage(),
            omitted_tools=self._body.omitted_tools,
        )


DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _news(news: News) -> bytes:
    """The event of what has become of a block."""
    step, block, more = news
    if step is Step.BEGUN:
        return _event("content_block_start", index=block.index, content_block=_block(block, {}))
    if step is Step.ENDED:
        return _event("content_block_stop", index=block.index)
    kind, name = DELTAS[block.kind]
    return _event("content_block_delta", index=block.index, delta={"type": kind, name: more})


def _block(block: Block, arguments: dict[str, Any]) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _arguments(block: Block) -> dict[str, Any]:
    """The object that a call's arguments are; nothing where they were cut off."""
    try:
        value = json.loads(block.text)
        value = json.loads(whole_letters(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **values: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **values})}\n\n".encode()
