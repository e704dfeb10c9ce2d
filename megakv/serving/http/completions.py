"""Answers of ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import ChatCompletionMessageFunctionToolCall, Function
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import CompletionUsage, PromptTokensDetails
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import ReasoningText, ToolCall
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megakv.serving.http.answers import Answers, Piece
from megakv.serving.http.call import ServedModel
from megakv.serving.http.chat_schemas import ChatBody
from megakv.serving.http.parts import MoreArguments, Part, Parts, call_id
from megakv.serving.http.schemas import CompletionBody
from megakv.serving.http.stream import BEAT, DONE, data, error_event
from megakv.serving.request import Progress, Token

M = TypeVar("M", bound=BaseModel)
LEAST = -9999.0
"""For what cannot be: JSON has no infinity."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""With it SentencePiece writes one."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def made(kind: type[M], **values: Any) -> M:
    """Object of values that are right. OpenAI's own way looks at each of them, which took a third of a token's time."""
    found: M = BaseModel.model_construct.__func__(kind, **values)  # type: ignore[attr-defined]
    return found


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[Token]) -> list[ChatCompletionTokenLogprob]:
    """For ``/v1/chat/completions``."""
    found = []
    for token in tokens:
        text, content = _text(tokenizer, token.id)
        top = []
        for other, logprob in token.top:
            name, raw = _text(tokenizer, other)
            top.append(TopLogprob(token=name, bytes=raw, logprob=_finite(logprob)))
        found.append(
            ChatCompletionTokenLogprob(token=text, bytes=content, logprob=_finite(token.logprob), top_logprobs=top)
        )
    return found


def completion_logprobs(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[Token], offset: int) -> Logprobs:
    """For ``/v1/completions``; `offset` is where in the answer's text the first token begins."""
    values = Logprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    assert values.text_offset is not None and values.token_logprobs is not None
    assert values.tokens is not None and values.top_logprobs is not None
    for token in tokens:
        text, _ = _text(tokenizer, token.id)
        values.text_offset.append(offset)
        first: Any = None  # Of a prompt's first token there is none, which the type does not know.
        values.token_logprobs.append(first if token.logprob is None else _finite(token.logprob))
        values.tokens.append(text)
        top = {_text(tokenizer, other)[0]: _finite(logprob) for other, logprob in token.top}
        # The chosen one is always there.
        values.top_logprobs.append(first if token.logprob is None else {**top, text: _finite(token.logprob)})
        offset += len(text)
    return values


def prompt_logprobs(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[Token], most: int) -> list[Any]:
    """Log probabilities of a prompt as vLLM has them: by token, none of the first; ranks where they are known."""
    found: list[Any] = []
    for token in tokens:
        likely = {other: (logprob, rank) for rank, (other, logprob) in enumerate(token.top, 1)}
        own = {token.id: likely.get(token.id, (token.logprob, None))}
        shown = own | dict(list(likely.items())[:most])
        found.append(
            None
            if token.logprob is None
            else {
                str(id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": _text(tokenizer, id)[0]}
                for id, (logprob, rank) in shown.items()
            }
        )
    return found


def _finite(logprob: float | None) -> float:
    return LEAST if logprob is None or logprob < LEAST else logprob


def _text(tokenizer: PreTrainedTokenizerBase, token: int) -> tuple[str, list[int]]:
    """A token as text, and its bytes, which may be but a part of a character."""
    text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    name = tokenizer.convert_ids_to_tokens(token) or ""
    if name.startswith(SPACE) and not text.startswith(" "):
        # A text's first space goes with the decoder that has put it there; a token's own does not.
        text = f" {text}"
    if "\N{REPLACEMENT CHARACTER}" in text:
        if match := BYTE.fullmatch(name):
            return text, [int(match[1], 16)]
        letters = _byte_letters()
        if all(letter in letters for letter in name):
            return text, [letters[letter] for letter in name]
    return text, list(text.encode())


@cache
def _byte_letters() -> dict[str, int]:
    """Of byte-level tokenizers, which write every byte as a letter."""
    return {letter: value for value, letter in bytes_to_unicode().items()}


class _Writer(ABC):
    """Writes the answers to one call, whole or as they come."""

    failed = staticmethod(error_event)

    def __init__(self, served: ServedModel, body: ChatBody | CompletionBody, answers: Answers, kind: str):
        self._served, self._answers, self._options = served, answers, body.stream_options
        self._progress = body.return_progress
        self._head: dict[str, Any] = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The answers as they come."""
        options = self._options
        for choice in self._beginnings():
            yield self._event([choice])
        async for piece in self._answers.pieces():
            if piece is None:
                yield BEAT
            elif isinstance(piece, Progress):
                if self._progress:
                    yield self._event([], prompt_progress=self._answers.progress(piece))
            else:
                running = options is not None and options.continuous_usage_stats
                more = {"usage": self._usage()} if running else {}
                for choice in self._choices(piece):
                    yield self._event([choice], **more)
        if options is not None and options.include_usage:
            yield self._event([], usage=self._usage())
        yield DONE

    def _beginnings(self) -> Sequence[BaseModel]:
        """What is said before anything is there."""
        return ()

    @abstractmethod
    def _choices(self, piece: Piece) -> Sequence[BaseModel]:
        """What a piece adds to a stream."""

    @abstractmethod
    def _object(self, choices: Sequence[Any], **more: Any) -> BaseModel:
        """One event."""

    def _event(self, choices: Sequence[Any], **more: Any) -> bytes:
        return data(self._object(choices, **more).model_dump_json(exclude_unset=True))

    def _usage(self) -> CompletionUsage:
        """With what was found in the prefix store."""
        usage = self._answers.usage
        return CompletionUsage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.new_tokens,
            total_tokens=usage.prompt_tokens + usage.new_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        )


class CompletionAnswer(_Writer):
    """Answers of ``/v1/completions``."""

    def __init__(self, served: ServedModel, body: CompletionBody, answers: Answers):
        super().__init__(served, body, answers, "cmpl")
        self._body, self._letters = body, [0] * answers.count
        self._begun: set[int] = set()

    async def whole(self) -> BaseModel:
        """All answers in one object."""
        choices = [choice for piece in await self._answers.whole() for choice in self._choices(piece)]
        return self._object(choices, usage=self._usage())

    def _choices(self, piece: Piece) -> list[CompletionChoice]:
        logprobs, more, tokens, text = None, dict[str, Any](), piece.tokens, piece.text
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            prompt = self._answers.prompt(piece.index) if self._body.echo or self._body.scores is not None else []
            if self._body.echo:
                text = self._echo(piece.index, prompt) + text
                tokens = [replace(token, top=token.top[: self._body.logprobs]) for token in prompt] + tokens
            if (most := self._body.prompt_logprobs) is not None:
                more["prompt_logprobs"] = prompt_logprobs(self._served.tokenizer, prompt, most)
        if self._body.logprobs is not None:
            logprobs = completion_logprobs(self._served.tokenizer, tokens, self._letters[piece.index])
        self._letters[piece.index] += len(text)
        # Of a part there is no reason yet, which the type does not know.
        end: Any = piece.finish
        return [made(CompletionChoice, index=piece.index, text=text, finish_reason=end, logprobs=logprobs, **more)]

    def _echo(self, index: int, prompt: Sequence[Token]) -> str:
        """The prompt as it was given, or the text of its tokens."""
        given = self._body.prompt
        own: Any = given if isinstance(given, str) else given[index // (self._body.n or 1)]
        if isinstance(own, str):
            return own
        skipped = self._body.skip_special_tokens
        ids = [token.id for token in prompt]
        return self._served.tokenizer.decode(ids, skip_special_tokens=skipped, clean_up_tokenization_spaces=False)

    def _object(self, choices: Sequence[Any], **more: Any) -> BaseModel:
        return made(Completion, object="text_completion", choices=list(choices), **self._head, **more)


class ChatAnswer(_Writer):
    """Answers of ``/v1/chat/completions``."""

    def __init__(self, served: ServedModel, body: ChatBody, answers: Answers, parts: Sequence[Parts]):
        super().__init__(served, body, answers, "chatcmpl")
        self._body, self._parts = body, parts
        self._calls = [0] * answers.count  # Of tools, by answer.

    async def whole(self) -> BaseModel:
        """All answers in one object."""
        choices = []
        for piece in await self._answers.whole():
            logprobs = None
            if self._body.logprobs:
                logprobs = ChoiceLogprobs(content=chat_logprobs(self._served.tokenizer, piece.tokens))
            message = _message(self._parts[piece.index].add(piece.text, last=True))
            end = self._end(piece.finish or "", called=bool(message.tool_calls))
            choices.append(Choice(index=piece.index, message=message, finish_reason=end, logprobs=logprobs))
        return ChatCompletion(object="chat.completion", choices=choices, usage=self._usage(), **self._head)

    def _beginnings(self) -> list[ChunkChoice]:
        begun = ChoiceDelta(role="assistant", content=None if self._body.must_call else "")
        return [ChunkChoice(index=index, delta=begun, finish_reason=None) for index in range(self._answers.count)]

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

    def _object(self, choices: Sequence[Any], **more: Any) -> BaseModel:
        return ChatCompletionChunk(object="chat.completion.chunk", choices=list(choices), **self._head, **more)


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
