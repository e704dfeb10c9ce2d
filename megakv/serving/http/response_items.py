"""Items of ``/v1/responses`` as messages of a chat, and such messages as items."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from megakv.serving.http.conversations import Turn
from megakv.serving.http.errors import ApiError
from megakv.serving.http.message_schemas import Message
from megakv.serving.http.response_schemas import (
    ResponseBody,
    ResponseCall,
    ResponseCallOutput,
    ResponseCustomCall,
    ResponseMessage,
    ResponseReasoning,
)
from megakv.serving.http.schemas import NO_LIMIT

Messages = list[dict[str, Any]]


def messages_of(body: ResponseBody) -> Messages:
    """What a body adds to a conversation, as chat templates take it."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    return [Message.model_validate(message).template_values() for message in _joined(body)]


def _joined(body: ResponseBody) -> Iterator[dict[str, Any]]:
    """What one answer thought, said and called is one message."""
    answer: dict[str, Any] = {}
    for item in body.input:
        said = isinstance(item, ResponseMessage) and item.role == "assistant"
        calls = isinstance(item, ResponseCall | ResponseCustomCall)
        thought = isinstance(item, ResponseReasoning)
        begins = (said or thought) and (answer.get("content") or "tool_calls" in answer)
        if answer and (begins or not (said or calls or thought)):
            yield answer
            answer = {}
        if isinstance(item, ResponseCallOutput):
            yield {"role": "tool", "content": item.output, "tool_call_id": item.call_id}
        elif isinstance(item, ResponseReasoning):
            answer = answer or assistant()
            answer["reasoning_content"] = answer.get("reasoning_content", "") + item.text
        elif isinstance(item, ResponseCall | ResponseCustomCall):
            text = item.arguments if isinstance(item, ResponseCall) else json.dumps({"input": item.input})
            answer = answer or assistant()
            answer.setdefault("tool_calls", []).append(called(item.call_id, item.name, text))
        elif isinstance(item, ResponseMessage) and said:
            answer = {**(answer or assistant()), "content": item.content}
        elif isinstance(item, ResponseMessage):
            yield {"role": item.role, "content": item.content}
    if answer:
        yield answer


def assistant(content: str = "") -> dict[str, Any]:
    """A message of the model's."""
    return {"role": "assistant", "content": content}


def called(name: str, function: str, arguments: str) -> dict[str, Any]:
    """A call in a message."""
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def input_items(name: str, turn: Turn, query: Mapping[str, str]) -> dict[str, Any]:
    """A page of what the response of this name was made from, its whole conversation, as a query asks for it."""
    limit, after, order = query.get("limit", "20"), query.get("after"), query.get("order", "desc")
    if not re.fullmatch("[1-9][0-9]?|100", limit, re.ASCII):
        raise _wrong("limit", f"{limit!r} is no length of a page; allowed: 1 to 100")
    if order not in ("asc", "desc"):
        raise _wrong("order", f"{order!r} is no order; allowed: 'asc' or 'desc'")
    # The last message is the answer.
    items = [
        {"id": f"item_{name.removeprefix('resp_')}_{number}", **item}
        for number, item in enumerate(each for message in turn.messages[:-1] for each in _items(message))
    ]
    if order == "desc":
        items.reverse()
    names = [item["id"] for item in items]
    if after is not None:
        if after not in names:
            raise _wrong("after", f"there is no item {after!r}")
        items = items[names.index(after) + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, "has_more": len(items) > int(limit), **ends}


def _items(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    role, content = message["role"], message.get("content") or ""
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": content}
        return
    if thought := message.get("reasoning_content"):
        yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]}
    calls = message.get("tool_calls") or []
    if content or not calls:
        said = {"type": "output_text", "annotations": []} if role == "assistant" else {"type": "input_text"}
        yield {"type": "message", "role": role, "status": "completed", "content": [{**said, "text": content}]}
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        yield {"type": "function_call", "call_id": call["id"], "name": name, "arguments": text, "status": "completed"}


def _wrong(field: str, message: str) -> ApiError:
    return ApiError(400, f"{field}: {message}", code="invalid_value", param=field)


Encode = Callable[[Messages], Awaitable[tuple[int, ...]]]
"""Makes the prompt of a conversation."""


async def prompt_of(body: ResponseBody, messages: Messages, encode: Encode, context: int | None) -> tuple[int, ...]:
    """The prompt of a whole conversation, or of what is left of it where its oldest turns may be left out."""
    if body.truncation != "auto" or context is None:
        return await encode(messages)
    asked = None if body.max_output_tokens == NO_LIMIT else body.max_output_tokens
    return await _newest_that_fit(messages, encode, context - min(asked or 1, context // 2))


async def _newest_that_fit(messages: Messages, encode: Encode, most: int) -> tuple[int, ...]:
    """The prompt of as many of the last turns as have no more tokens than that; a turn begins with a user's message.

    Each is looked at as a whole, for templates write what they like: the number is found by halving.
    """
    begins = [number for number, message in enumerate(messages) if message["role"] == "user"][1:]
    system = [message for message in messages[: next(iter(begins), 0)] if message["role"] in ("system", "developer")]

    async def encoded(number: int) -> tuple[int, ...] | ApiError:
        """Without the first `number` turns."""
        try:
            return await encode(messages if number == 0 else [*system, *messages[begins[number - 1] :]])
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return error

    first = await encoded(0)
    if not isinstance(first, ApiError) and (len(first) <= most or not begins):
        return first
    low, high, best = 1, len(begins), first
    while low <= high:
        middle = (low + high) // 2
        found = await encoded(middle)
        if not isinstance(found, ApiError) and len(found) <= most:
            best, high = found, middle - 1
        else:
            low = middle + 1
    if isinstance(best, ApiError):
        raise best
    return best
