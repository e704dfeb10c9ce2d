"""An answer in parts: text, reasoning and calls of tools, by the model's answer template or its own form."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import STREAMABLE_PARSERS
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

from megakv.serving.form import CALL_ARGUMENTS, CALL_NAME
from megakv.serving.http.schemas import FunctionCall
from megakv.serving.http.served_model import ServedModel

PREFIX_TOKENS = 256
"""Of a prompt's end: the beginning of the answer stands in it, where the chat template writes one."""


@dataclass(frozen=True)
class MoreArguments:
    """Goes on the arguments of the last call."""

    text: str


Part: TypeAlias = "str | ReasoningText | ToolCall | MoreArguments"


class Parts(Protocol):
    """Cuts one answer's text as it comes."""

    def add(self, text: str, *, last: bool) -> list[Part]:
        """The parts that are complete, or more of the present one."""


class PlainParts:
    """All is text."""

    def add(self, text: str, *, last: bool) -> list[Part]:
        return [text] if text else []


class _AnswerParser(ResponseParser):
    """Gives out as text, as it was written, what transformers' parser would raise an error about."""

    _opened_at = 0

    def rest(self) -> list[dict[str, Any]]:
        """The events of the text's end."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _open_explicit(self, events: list[dict[str, Any]], field: ResponseTemplateField, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._opened_at = m.start()

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        name, closed = self._current, list[dict[str, Any]]()
        written = self._body if name == self._implicit_name else self._buffer[self._opened_at : self._pos]
        try:
            super()._close_current(closed)
            if name == "tool_calls":
                # A template may read several calls at once.
                closed = [{**event, "value": call} for event in closed for call in _calls(event["value"])]
        except Exception:  # whatever a model's words make a template's parsers raise
            self._reset_to_implicit()
            # Text of other fields has been given out.
            structured = name is not None and self._spec.fields[name].content not in STREAMABLE_PARSERS
            closed = [{"type": "region_chunk", "field": "content", "text": written}] if structured else []
        events += closed


def _calls(value: Any) -> Iterator[dict[str, Any]]:
    """Calls that a client can use and send back; an error where one is none."""
    for call in value if isinstance(value, list) else [value]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps({**arguments}, allow_nan=False)
        yield {"function": FunctionCall(name=name, arguments=arguments).model_dump()}


class TemplateParts:
    """As the model's answer template marks them."""

    def __init__(self, template: Any, prefix: str, tools: list[dict[str, Any]]):
        self._parser = _AnswerParser(template, prefix=prefix, tools=tools)

    def add(self, text: str, *, last: bool) -> list[Part]:
        events = self._parser.feed(text)
        found: list[Part] = response_events_to_chunks([*events, *self._parser.rest()] if last else events)
        return found


class NamedCallParts:
    """All is the arguments of one function, in whatever pieces it comes, be it cut off."""

    def __init__(self, name: str):
        self._begun: list[Part] = [ToolCall(name, "")]

    def add(self, text: str, *, last: bool) -> list[Part]:
        found, self._begun = self._begun, []
        return [*found, MoreArguments(text)] if text else found


class CallsParts:
    """An array of calls, as of `Form.calls`: each of them when it is whole."""

    def __init__(self) -> None:
        self._call = ""
        self._depth, self._quoted, self._escaped = 0, False, False

    def add(self, text: str, *, last: bool) -> list[Part]:
        found: list[Part] = []
        for letter in text:
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            else:
                self._quoted = letter == '"'
                self._depth += {"{": 1, "}": -1}.get(letter, 0)
            if self._depth:
                self._call += letter
            elif letter == "}":
                name, _, arguments = self._call.removeprefix(CALL_NAME).partition(CALL_ARGUMENTS)
                found.append(ToolCall(json.loads(name), arguments))
                self._call = ""
        return found


def free_parts(served: ServedModel, prompt: tuple[int, ...], tools: list[dict[str, Any]]) -> Parts:
    """Of an answer that is held to nothing; without a template it is all text."""
    if served.answer_template is None:
        return PlainParts()
    return TemplateParts(served.answer_template, served.tokenizer.decode(list(prompt[-PREFIX_TOKENS:])), tools)


def call_id() -> str:
    """A name for a call of a tool."""
    return f"call_{uuid.uuid4().hex[:24]}"
