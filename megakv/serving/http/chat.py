"""``/v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import ChatCompletionMessageFunctionToolCall, Function
from openai.types.completion_usage import CompletionUsage, PromptTokensDetails
from transformers.cli.serving.utils import ReasoningText, ToolCall

from megakv.serving.http.answers import Answers, Piece, Usage
from megakv.serving.http.logprobs import chat_logprobs
from megakv.serving.http.parts import MoreArguments, Part, Parts, call_id
from megakv.serving.http.schemas import ChatBody
from megakv.serving.http.served_model import ServedModel
from megakv.serving.http.stream import BEAT, DONE, data, error_event
from megakv.serving.request import Progress


def openai_usage(usage: Usage) -> CompletionUsage:
    """With what was found in the prefix store."""
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.new_tokens,
        total_tokens=usage.prompt_tokens + usage.new_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


def prompt_progress(progress: Progress, began: float) -> dict[str, Any]:
    """How far a prompt was read, as llama.cpp says it, and which rank holds how much of it."""
    spent = int((time.monotonic() - began) * 1e3)
    found = {"total": progress.total, "cache": progress.cached, "processed": progress.read, "time_ms": spent}
    return found | ({"ranks": progress.ranks} if progress.ranks else {})


class ChatAnswer:
    """Writes the answers to one call of the endpoint."""

    failed = staticmethod(error_event)

    def __init__(self, served: ServedModel, body: ChatBody, answers: Answers, parts: Sequence[Parts]):
        self._served, self._body, self._answers, self._parts = served, body, answers, parts
        self._id, self._created, self._began = f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), time.monotonic()
        self._calls = [0] * answers.count  # Of tools, by answer.

    async def whole(self) -> ChatCompletion:
        """All answers in one object."""
        count = self._answers.count
        parts: list[list[Part]] = [[] for _ in range(count)]
        tokens: list[list[Any]] = [[] for _ in range(count)]
        ends = [""] * count
        async with self._answers:
            async for piece in self._answers.pieces():
                if isinstance(piece, Piece):
                    parts[piece.index] += self._parts[piece.index].add(piece.text, last=piece.finish is not None)
                    tokens[piece.index] += piece.tokens if self._body.logprobs else []
                    ends[piece.index] = piece.finish or ""
        choices = []
        for index in range(count):
            logprobs = None
            if self._body.logprobs:
                logprobs = ChoiceLogprobs(content=chat_logprobs(self._served.tokenizer, tokens[index]))
            message = _message(parts[index])
            end = self._end(ends[index], called=bool(message.tool_calls))
            choices.append(Choice(index=index, message=message, finish_reason=end, logprobs=logprobs))
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._served.name,
            choices=choices,
            usage=openai_usage(self._answers.usage),
        )

    async def events(self) -> AsyncIterator[bytes]:
        """The answers as they come."""
        options = self._body.stream_options
        usage = options is not None and options.include_usage
        running = options is not None and options.continuous_usage_stats
        begun = ChoiceDelta(role="assistant", content=None if self._body.must_call else "")
        for index in range(self._answers.count):
            yield self._chunk([ChunkChoice(index=index, delta=begun, finish_reason=None)])
        async for piece in self._answers.pieces():
            if piece is None:
                yield BEAT
            elif isinstance(piece, Progress):
                if self._body.return_progress:
                    yield self._chunk([], prompt_progress=prompt_progress(piece, self._began))
            else:
                more = {"usage": openai_usage(self._answers.usage)} if running else {}
                for choice in self._choices(piece):
                    yield self._chunk([choice], **more)
        if usage:
            yield self._chunk([], usage=openai_usage(self._answers.usage))
        yield DONE

    def _choices(self, piece: Piece) -> list[ChunkChoice]:
        found = []
        for part in self._parts[piece.index].add(piece.text, last=piece.finish is not None):
            found.append(ChunkChoice(index=piece.index, delta=self._delta(piece.index, part), finish_reason=None))
        if self._body.logprobs and piece.tokens:
            if not found:
                # Its text may come later, or be none.
                found.append(ChunkChoice(index=piece.index, delta=ChoiceDelta(), finish_reason=None))
            found[0].logprobs = ChunkLogprobs(content=chat_logprobs(self._served.tokenizer, piece.tokens))
        if piece.finish is not None:
            end = self._end(piece.finish, called=self._calls[piece.index] > 0)
            found.append(ChunkChoice(index=piece.index, delta=ChoiceDelta(), finish_reason=end))
        return found

    def _end(self, why: str, *, called: bool) -> Any:
        """As OpenAI says it: whoever has named a function is not told that the answer is a call."""
        return "tool_calls" if called and why == "stop" and self._body.named is None else why

    def _delta(self, index: int, part: Part) -> ChoiceDelta:
        if isinstance(part, ToolCall):
            function = ChoiceDeltaToolCallFunction(name=part.name, arguments=part.arguments)
            call = ChoiceDeltaToolCall(index=self._calls[index], id=call_id(), type="function", function=function)
            self._calls[index] += 1
            return ChoiceDelta(tool_calls=[call])
        if isinstance(part, MoreArguments):
            more = ChoiceDeltaToolCallFunction(arguments=part.text)
            return ChoiceDelta(tool_calls=[ChoiceDeltaToolCall(index=self._calls[index] - 1, function=more)])
        if isinstance(part, ReasoningText):
            return ChoiceDelta.model_validate({"reasoning_content": str(part)})
        return ChoiceDelta(content=part)

    def _chunk(self, choices: list[ChunkChoice], **more: Any) -> bytes:
        chunk = ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._served.name,
            choices=choices,
            **more,
        )
        return data(chunk.model_dump_json(exclude_unset=True))


def _message(parts: list[Part]) -> ChatCompletionMessage:
    functions: list[Function] = []
    content = reasoning = ""
    for part in parts:
        if isinstance(part, ToolCall):
            functions.append(Function(name=part.name, arguments=part.arguments))
        elif isinstance(part, MoreArguments):
            functions[-1].arguments += part.text
        elif isinstance(part, ReasoningText):
            reasoning += part
        else:
            content += part
    values: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        values["reasoning_content"] = reasoning
    if functions:
        calls = [
            ChatCompletionMessageFunctionToolCall(id=call_id(), type="function", function=function)
            for function in functions
        ]
        values |= {"tool_calls": calls, "content": content or None}
    return ChatCompletionMessage(**values)
