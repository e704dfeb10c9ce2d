"""``/v1/responses``: answers that later calls go on from, by `previous_response_id`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Literal

from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseUsage,
)
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from transformers.cli.serving.utils import ReasoningText, ToolCall

from megakv.serving.http.answers import Answers, Piece
from megakv.serving.http.chat_schemas import (
    ResponseBody,
    ResponseCall,
    ResponseCallOutput,
    ResponseMessage,
    ResponseNamedTool,
)
from megakv.serving.http.errors import ApiError
from megakv.serving.http.parts import MoreArguments, Part, Parts, call_id
from megakv.serving.http.schemas import Message
from megakv.serving.http.stream import BEAT
from megakv.serving.request import Progress


def messages_of(body: ResponseBody) -> list[dict[str, Any]]:
    """What a body adds to a conversation, as chat templates take it."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    messages: list[dict[str, Any]] = []
    for item in body.input:
        if isinstance(item, ResponseMessage):
            messages.append(Message(role=item.role, content=item.content).template_values())
        elif isinstance(item, ResponseCall):
            call = {
                "id": item.call_id,
                "type": "function",
                "function": {"name": item.name, "arguments": item.arguments},
            }
            message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append(message.template_values())
        elif isinstance(item, ResponseCallOutput):
            messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
    return messages


Kept = Callable[[Response, dict[str, Any]], None]
"""Is given a finished response, and its answer as a message."""


class ResponseAnswer:
    """Writes the answer to one call of the endpoint."""

    def __init__(self, name: str, body: ResponseBody, parts: Parts, answers: Answers, keep: Kept):
        self._body, self._parts, self._answers, self._keep = body, parts, answers, keep
        self._name, self._created = name, time.time()
        self._message, self._text, self._finish = f"msg_{uuid.uuid4().hex}", "", ""
        self._where: dict[str, Any] = {"item_id": self._message, "output_index": 0, "content_index": 0}
        self._calls: list[ResponseFunctionToolCall] = []
        self._number = 0

    async def whole(self) -> Response:
        """The answer in one object."""
        for piece in await self._answers.whole():
            list(self._taken(piece))
        return self._finished()

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as it comes."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        if not self._body.must_call:
            empty = self._output_message("", "in_progress")
            yield self._event("response.output_item.added", output_index=0, item={**empty.model_dump(), "content": []})
            yield self._event("response.content_part.added", part=_text_part(""), **self._where)
        async for piece in self._answers.pieces():
            if piece is None:
                yield BEAT
            elif isinstance(piece, Progress):
                if self._body.return_progress:
                    progress = self._answers.progress(piece)
                    response = self._response("in_progress")
                    yield self._event("response.in_progress", response=response, prompt_progress=progress)
            else:
                for part in self._taken(piece):
                    for event in self._news(part):
                        yield event
        response = self._finished()
        for number, item in enumerate(response.output):
            if isinstance(item, ResponseFunctionToolCall):
                what = {"item_id": item.id, "output_index": number, "name": item.name, "arguments": item.arguments}
                yield self._event("response.function_call_arguments.done", **what)
            else:
                yield self._event("response.output_text.done", text=self._text, logprobs=[], **self._where)
                yield self._event("response.content_part.done", part=_text_part(self._text), **self._where)
            yield self._event("response.output_item.done", output_index=number, item=item)
        yield self._event(f"response.{response.status}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        said = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=self._response("failed", error=said))

    def _taken(self, piece: Piece) -> Iterator[Part]:
        """What a piece adds, part by part, each when the answer has it."""
        self._finish = piece.finish or self._finish
        for part in self._parts.add(piece.text, last=piece.finish is not None):
            if isinstance(part, ReasoningText):
                continue
            if isinstance(part, ToolCall):
                name = call_id()
                values: dict[str, Any] = {"id": name, "call_id": name, "name": part.name, "arguments": part.arguments}
                self._calls.append(ResponseFunctionToolCall(type="function_call", status="completed", **values))
            elif isinstance(part, MoreArguments):
                self._calls[-1].arguments += part.text
            else:
                self._text += part
            yield part

    def _news(self, part: Part) -> Iterator[bytes]:
        """Events of the part that was taken last."""
        if isinstance(part, str):
            yield self._event("response.output_text.delta", delta=part, logprobs=[], **self._where)
            return
        call, number = self._calls[-1], len(self._calls) - self._body.must_call
        if isinstance(part, ToolCall):
            begun = call.model_copy(update={"arguments": "", "status": "in_progress"})
            yield self._event("response.output_item.added", output_index=number, item=begun)
        if more := part.text if isinstance(part, MoreArguments) else part.arguments:
            what = {"item_id": call.id, "output_index": number}
            yield self._event("response.function_call_arguments.delta", delta=more, **what)

    def _finished(self) -> Response:
        status: Literal["incomplete", "completed"] = "incomplete" if self._finish == "length" else "completed"
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        if self._body.named is not None:
            # Its arguments are cut off where the answer is; other calls are given when they are whole.
            self._calls[-1].status = status
        said = [] if self._body.must_call else [self._output_message(self._text, status)]
        output = [*said, *self._calls]
        response = self._response(status, output=output, usage=self._usage(), **more)
        message: dict[str, Any] = {"role": "assistant", "content": self._text}
        if self._calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self._calls
            ]
            message = Message.model_validate(message).template_values()
        self._keep(response, message)
        return response

    def _output_message(self, text: str, status: str) -> ResponseOutputMessage:
        return ResponseOutputMessage.model_validate(
            {
                "id": self._message,
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [_text_part(text)],
            }
        )

    def _usage(self) -> ResponseUsage:
        usage = self._answers.usage
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            # Older types have no count of what a cache was given.
            input_tokens_details=InputTokensDetails.model_validate(
                {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
            ),
            output_tokens=usage.new_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=usage.prompt_tokens + usage.new_tokens,
        )

    def _response(self, status: str, **more: Any) -> Response:
        body, choice = self._body, self._body.tool_choice
        values = {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": body.model,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": choice.model_dump() if isinstance(choice, ResponseNamedTool) else choice or "auto",
            "tools": [{**tool.model_dump(), "strict": False} for tool in body.tools or []],
            "metadata": {},
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }
        return Response.model_validate({**values, **more})

    def _event(self, kind: str, **values: Any) -> bytes:
        plain = {
            name: value.model_dump(mode="json", by_alias=True) if hasattr(value, "model_dump") else value
            for name, value in values.items()
        }
        event = json.dumps({"type": kind, "sequence_number": self._number, **plain})
        self._number += 1
        return f"event: {kind}\ndata: {event}\n\n".encode()


def _text_part(text: str) -> dict[str, Any]:
    return ResponseOutputText(type="output_text", text=text, annotations=[], logprobs=[]).model_dump()
