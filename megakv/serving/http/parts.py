"""An answer in parts: text, reasoning and calls of tools, by the model's answer template or its own form."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser

from megakv.serving.form import CALL_ARGUMENTS, CALL_NAME
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


class TemplateParts:
    """As the model's answer template marks them."""

    def __init__(self, template: Any, prefix: str, tools: list[dict[str, Any]]):
        self._parser = ResponseParser(template, prefix=prefix, tools=tools)
        self._begun: list[Part] = response_events_to_chunks(self._parser.initial_events)

    def add(self, text: str, *, last: bool) -> list[Part]:
        found, self._begun = self._begun, []
        found += response_events_to_chunks(self._parser.feed(text))
        if last:
            try:
                found += response_events_to_chunks(self._parser.finalize()[1])
            except (ValueError, RuntimeError):
                # It ended in the midst of a call, of which nothing can be made.
                return found
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
