"""``/v1/responses``: answers that later calls go on from, by `previous_response_id`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Literal

from openai.types.responses import Response, ResponseUsage
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from megakv.serving.http.answers import Answers, Piece
from megakv.serving.http.blocks import Block, Blocks, News, Step
from megakv.serving.http.call import ServedModel
from megakv.serving.http.completions import chat_logprobs
from megakv.serving.http.errors import ApiError
from megakv.serving.http.message_schemas import Message
from megakv.serving.http.parts import Parts
from megakv.serving.http.response_items import assistant, called
from megakv.serving.http.response_schemas import BuiltInTool, CustomTool, ResponseBody, ResponseNamedTool, ResponseTool
from megakv.serving.http.schemas import NO_LIMIT, whole_letters
from megakv.serving.http.stream import BEAT
from megakv.serving.request import Progress

Kept = Callable[[Response, dict[str, Any]], None]
"""Is given a finished response, and its answer as a message."""
PARTS = {"text": "output_text", "reasoning": "reasoning_text"}
"""Types of what items of blocks have in them."""


class ResponseAnswer:
    """Writes the answer to one call of the endpoint."""

    def __init__(self, name: str, served: ServedModel, body: ResponseBody, parts: Parts, answers: Answers, keep: Kept):
        self._served, self._body, self._parts, self._answers, self._keep = served, body, parts, answers, keep
        self._name, self._created = name, time.time()
        self._blocks, self._finish, self._number = Blocks(), "", 0
        self._logprobs: list[dict[str, Any]] = []
        self._told = 0
        """Log probabilities that a stream has told so far."""

    async def whole(self) -> Response:
        """The answer in one object."""
        for piece in await self._answers.whole():
            list(self._taken(piece))
        return self._finished()

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as it comes."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        async for piece in self._answers.pieces():
            if piece is None:
                yield BEAT
            elif isinstance(piece, Progress):
                if self._body.return_progress:
                    progress = self._answers.progress(piece)
                    response = self._response("in_progress")
                    yield self._event("response.in_progress", response=response, prompt_progress=progress)
            else:
                for news in self._taken(piece):
                    for event in self._told_of(news):
                        yield event
        response = self._finished()
        yield self._event(f"response.{response.status}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        said = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=self._response("failed", error=said))

    def _taken(self, piece: Piece) -> Iterator[News]:
        """What a piece changes, step by step."""
        if self._body.logprobs is not None:
            found = chat_logprobs(self._served.tokenizer, piece.tokens)
            self._logprobs += [each.model_dump() for each in found]
        for part in self._parts.add(piece.text, last=piece.finish is not None):
            yield from self._blocks.add(part)
        if piece.finish is not None:
            self._finish = piece.finish
            yield from self._blocks.end(empty=not self._body.must_call)

    def _told_of(self, news: News) -> Iterator[bytes]:
        """Events of what has become of a block."""
        step, block, more = news
        if block.kind == "call":
            yield from self._told_of_call(news)
            return
        item, part = self._item(block, "in_progress"), PARTS[block.kind]
        where = {"item_id": item["id"], "output_index": block.index, "content_index": 0}
        chances = {"logprobs": self._logprobs[self._told :]} if block.kind == "text" else {}
        if step is Step.BEGUN:
            empty = {**item, "content": []}
            yield self._event("response.output_item.added", output_index=block.index, item=empty)
            yield self._event("response.content_part.added", part=item["content"][0], **where)
        elif step is Step.MORE:
            self._told = len(self._logprobs)
            yield self._event(f"response.{part}.delta", delta=more, **chances, **where)
        else:
            item = self._item(block, self._status)
            chances = {"logprobs": self._chances(block)} if block.kind == "text" else {}
            yield self._event(f"response.{part}.done", text=block.text, **chances, **where)
            yield self._event("response.content_part.done", part=item["content"][0], **where)
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _told_of_call(self, news: News) -> Iterator[bytes]:
        step, block, more = news
        custom = block.name in self._body.custom
        item = self._item(block, "in_progress")
        where = {"item_id": item["id"], "output_index": block.index}
        if step is Step.BEGUN:
            yield self._event("response.output_item.added", output_index=block.index, item=item)
        elif step is Step.MORE and not custom:
            yield self._event("response.function_call_arguments.delta", delta=more, **where)
        elif step is Step.ENDED:
            item = self._item(block, self._status)
            if custom:
                # It is within JSON, and known when that is whole.
                yield self._event("response.custom_tool_call_input.delta", delta=item["input"], **where)
                yield self._event("response.custom_tool_call_input.done", input=item["input"], **where)
            else:
                done = {"name": block.name, "arguments": block.text}
                yield self._event("response.function_call_arguments.done", **done, **where)
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _chances(self, block: Block) -> list[dict[str, Any]]:
        """Log probabilities of all tokens, which the first text has."""
        first = next(each for each in self._blocks.all if each.kind == "text")
        return self._logprobs if block is first else []

    @property
    def _status(self) -> Literal["incomplete", "completed"]:
        return "incomplete" if self._finish == "length" else "completed"

    def _finished(self) -> Response:
        status = self._status
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        last = len(self._blocks.all) - 1
        output = [self._item(block, status if block.index == last else "completed") for block in self._blocks.all]
        response = self._response(status, output=output, usage=self._usage(), **more)
        message = assistant(self._blocks.text)
        if self._blocks.reasoning:
            message["reasoning_content"] = self._blocks.reasoning
        if calls := self._blocks.calls:
            message["tool_calls"] = [called(_call_id(call), call.name, call.text) for call in calls]
            message = Message.model_validate(message).template_values()
        self._keep(response, message)
        return response

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an item of the output."""
        if block.kind == "call":
            if block.name in self._body.custom:
                call = {"id": f"ctc_{block.id}", "type": "custom_tool_call", "call_id": _call_id(block)}
                return {**call, "name": block.name, "input": _input(block.text), "status": status}
            name = _call_id(block)
            call = {"id": name, "type": "function_call", "call_id": name, "name": block.name}
            # Calls are given when they are whole, but for a named function's, which are cut off where the answer is.
            named = self._body.named is not None
            return {**call, "arguments": block.text, "status": status if named else "completed"}
        content: dict[str, Any] = {"type": PARTS[block.kind], "text": block.text}
        if block.kind == "reasoning":
            return {"id": f"rs_{block.id}", "type": "reasoning", "summary": [], "content": [content], "status": status}
        content |= {"annotations": [], "logprobs": self._chances(block) if status != "in_progress" else []}
        message = {"id": f"msg_{block.id}", "type": "message", "role": "assistant"}
        return {**message, "status": status, "content": [content]}

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
            "max_output_tokens": None if body.max_output_tokens == NO_LIMIT else body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": choice.model_dump() if isinstance(choice, ResponseNamedTool) else choice or "auto",
            "tools": [_tool(tool) for tool in body.tools or [] if not isinstance(tool, BuiltInTool)],
            "omitted_tools": body.omitted,
            "truncation": body.truncation or "disabled",
            "top_logprobs": body.top_logprobs,
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


def _call_id(block: Block) -> str:
    return f"call_{block.id}"


def _input(arguments: str) -> str:
    """The text that a custom tool is given; the arguments as they are where they were cut off."""
    try:
        return whole_letters(str(json.loads(arguments)["input"]))
    except (ValueError, RecursionError, KeyError, TypeError):
        return arguments


def _tool(tool: ResponseTool | CustomTool) -> dict[str, Any]:
    return tool.model_dump() | ({"strict": False} if isinstance(tool, ResponseTool) else {})
