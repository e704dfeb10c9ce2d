"""Answers of ``/v1/messages``: blocks of text, thinking and calls of tools, as Anthropic's clients read them."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic import BaseModel
from transformers.cli.serving.utils import ReasoningText, ToolCall

from megakv.serving.http.answers import Answers, Piece
from megakv.serving.http.anthropic_schemas import MessagesBody
from megakv.serving.http.errors import ApiError
from megakv.serving.http.parts import MoreArguments, Part, Parts
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
    """Writes the answer to one call, whole or as it comes. One block is open at a time, the last."""

    def __init__(self, body: MessagesBody, answers: Answers, parts: Parts):
        self._body, self._answers, self._parts = body, answers, parts
        self._name = f"msg_{uuid.uuid4().hex[:24]}"
        self._blocks: list[dict[str, Any]] = []
        self._open, self._arguments, self._blank = False, "", ""
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
            yield from self._added(part)
        if piece.finish is not None:
            self._finish, self._stopped = piece.finish, piece.stopped
            if self._blank and not self._blocks:
                yield from self._more("text", self._blank)
            yield from self._closed()

    def _added(self, part: Part) -> Iterator[bytes]:
        if isinstance(part, ToolCall):
            call = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": part.name, "input": {}}
            yield from self._begun(call)
            yield from self._more_arguments(part.arguments)
        elif isinstance(part, MoreArguments):
            yield from self._more_arguments(part.text)
        elif isinstance(part, ReasoningText):
            yield from self._more("thinking", str(part))
        elif self._last != "text" and not (self._blank + part).strip():
            # Models leave lines between what they think, say and call: a block of nothing else is none.
            self._blank += part
        else:
            blank, self._blank = self._blank, ""
            yield from self._more("text", blank + part)

    def _more(self, kind: str, text: str) -> Iterator[bytes]:
        """More of a text or of thoughts."""
        if self._last != kind:
            yield from self._begun({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _more_arguments(self, text: str) -> Iterator[bytes]:
        self._arguments += text
        if text:
            yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _begun(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._closed()
        self._blank, self._open = "", True
        self._blocks.append(block)
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _closed(self) -> Iterator[bytes]:
        if not self._open:
            return
        if self._last == "tool_use":
            self._blocks[-1]["input"] = _input(self._arguments)
            self._arguments = ""
        self._open = False
        yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    @property
    def _last(self) -> str | None:
        """The type of the block that is open."""
        return self._blocks[-1]["type"] if self._open else None

    @property
    def _stop_reason(self) -> str | None:
        if self._finish is None:
            return None
        if self._finish == "length":
            return "max_tokens"
        if self._stopped is not None:
            return "stop_sequence"
        return "tool_use" if any(block["type"] == "tool_use" for block in self._blocks) else "end_turn"

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
            model=self._body.model,
            content=self._blocks,
            stop_reason=self._stop_reason,
            stop_sequence=self._stopped,
            usage=self._usage(),
            omitted_tools=self._body.omitted_tools,
        )


def _input(arguments: str) -> dict[str, Any]:
    """The object that a call's arguments are; nothing where they were cut off."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **values: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **values})}\n\n".encode()
