"""An answer's text from its tokens, where it stops, and its parts: text, reasoning and calls of tools."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import STREAMABLE_PARSERS
from transformers.utils.chat_parsing.response_templates import ResponseTemplateField
from transformers.utils.chat_template_utils import _REASONING_FIELDS

from megakv.serving.form import CALL_ARGUMENTS, CALL_NAME
from megakv.serving.http.message_schemas import FunctionCall

MOST_TOKENS = 32
"""Tokens that are decoded together; those before them are text for good."""
CONTEXT_TOKENS = 4
"""Of them, those that remain when it gets more: a tokenizer may treat a text's first token otherwise."""
MOST_WAITING = 8
"""Tokens that may wait for the rest of a character, which has four bytes at most: what is longer is none."""
BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text that is sure, token by token; a character of several tokens comes when it is whole.

    A text that goes on behind other tokens keeps the space that it begins with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special: bool = False, behind: Sequence[int] = ()):
        self._tokenizer, self._special = tokenizer, special
        self._tokens = list(behind[-CONTEXT_TOKENS:])
        before = self._text()
        while BROKEN in before:
            # Bytes of a character that begins earlier would be taken together with those of the answer.
            del self._tokens[0]
            before = self._text()
        self._given = len(before)  # Letters of these tokens' text that were given out.
        self._ends = [len(self._tokens)]  # So many of these tokens ended with a whole character.

    def add(self, token: int) -> str:
        """What the text has more by one more token."""
        self._tokens.append(token)
        text, count = self._text(), len(self._tokens)
        if text.endswith(BROKEN):
            if count - self._ends[-1] <= MOST_WAITING:
                return ""
            new = self._give(text)
            self._keep(count)
            return new
        self._ends.append(count)
        new = self._give(text)
        if count >= MOST_TOKENS:
            # Beginning within a character, what follows would look broken.
            self._keep(max(end for end in self._ends if end <= count - CONTEXT_TOKENS))
        return new

    def end(self) -> str:
        """What was not sure, when no more tokens come."""
        return self._give(self._text())

    def _text(self) -> str:
        text: str = self._tokenizer.decode(
            self._tokens, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
        )
        return text

    def _keep(self, first: int) -> None:
        """Go on from a later token, at which all is given out."""
        del self._tokens[:first]
        self._given = len(self._text())
        self._ends = [0, *(end - first for end in self._ends if end > first)]

    def _give(self, text: str) -> str:
        new = text[self._given :]
        self._given = max(self._given, len(text))
        return new


class StopStrings:
    """Finds the first of some strings in a text that comes in parts; holds back what may be the beginning of one.

    `shown` says whether the text ends with what was found, or before it.
    """

    def __init__(self, stops: Sequence[str], *, shown: bool = False):
        self._stops, self._shown = [stop for stop in stops if stop], shown
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """What can be shown of the text so far; nothing more once a stop was found."""
        if self.found is not None:
            return ""
        self._held += text
        if places := [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]:
            at, _, self.found = min(places)
            shown, self._held = self._held[: at + len(self.found) * self._shown], ""
            return shown
        keep = max((_begun(self._held, stop) for stop in self._stops), default=0)
        at = len(self._held) - keep
        shown, self._held = self._held[:at], self._held[at:]
        return shown

    @property
    def held(self) -> int:
        """Letters that are held back."""
        return len(self._held)

    def end(self) -> str:
        """What was held back, when no more comes."""
        shown, self._held = self._held, ""
        return shown


def _begun(text: str, stop: str) -> int:
    """Letters at the end of a text with which a stop may begin."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


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

    def __init__(self, template: Any, prefix: str, tools: list[dict[str, Any]]):
        self._opened_at = self.begin = 0
        self.spans: list[tuple[int, int]] = []
        super().__init__(template, prefix=prefix, tools=tools)
        self.begin = len(self._buffer)
        """Where in the text that it has an answer begins."""

    @property
    def thoughts_end(self) -> str | None:
        """What ends the reasoning in which the text stands; None where it stands in none."""
        name = self._current
        ends = self._spec.fields[name].close_literals if name in _REASONING_FIELDS else None
        return ends[0] if ends else None

    @property
    def sure(self) -> int:
        """Where in the text ends what was cut into parts for good."""
        name = self._current
        structured = name is not None and self._spec.fields[name].content not in STREAMABLE_PARSERS
        return self._opened_at if structured and name != self._implicit_name else self._pos

    def rest(self) -> list[dict[str, Any]]:
        """The events of the text's end."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        begin = self._pos
        if self._current is not None and self._spec.fields[self._current].content in STREAMABLE_PARSERS:
            # What the prompt ends with may have waited for what comes behind it.
            begin, text = max(begin, self.begin), text[max(0, self.begin - begin) :]
        super()._accumulate(events, text)
        if self._current == "content" and text:
            self.spans.append((begin, begin + len(text)))

    def _open_explicit(self, events: list[dict[str, Any]], field: ResponseTemplateField, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._opened_at = m.start()

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        name, closed = self._current, list[dict[str, Any]]()
        written = (
            self._body if name == self._implicit_name else self._buffer[max(self._opened_at, self.begin) : self._pos]
        )
        try:
            super()._close_current(closed)
            if name == "tool_calls":
                # A template may read several calls at once.
                closed = [{**event, "value": call} for event in closed for call in _calls(event["value"])]
        except Exception:  # whatever a model's words make a template's parsers raise
            self._reset_to_implicit()
            # Text of other fields has been given out.
            structured = name is not None and self._spec.fields[name].content not in STREAMABLE_PARSERS
            closed = []
            if structured:
                closed.append({"type": "region_chunk", "field": "content", "text": written})
                self.spans.append((self._pos - len(written), self._pos))
        events += closed


def _calls(value: Any) -> Iterator[dict[str, Any]]:
    """Calls that a client can use and send back; an error where one is none."""
    for call in value if isinstance(value, list) else [value]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not name:
            raise ValueError("a call of nothing")
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        # What is no object, and what is no JSON for all that Python reads it, are errors.
        written = json.dumps({**parsed}, allow_nan=False)
        if not isinstance(arguments, str):
            arguments = written
        yield {"function": FunctionCall(name=name, arguments=arguments).model_dump()}


class TemplateParts:
    """As the model's answer template marks them."""

    def __init__(self, template: Any, prefix: str, tools: list[dict[str, Any]]):
        self._parser = _AnswerParser(template, prefix, tools)

    def add(self, text: str, *, last: bool) -> list[Part]:
        events = self._parser.feed(text)
        found: list[Part] = response_events_to_chunks([*events, *self._parser.rest()] if last else events)
        return found


class Contents:
    """Where in an answer its content is, which is neither reasoning nor marks nor calls."""

    def __init__(self, template: Any, prefix: str, tools: list[dict[str, Any]]):
        self._parser = _AnswerParser(template, prefix, tools)
        self._parser.spans.clear()

    @property
    def sure(self) -> int:
        """Letters of the answer of which it is known."""
        return max(0, self._parser.sure - self._parser.begin)

    def add(self, text: str, *, last: bool) -> list[tuple[int, int]]:
        """Where more of it begins and ends, in letters of the answer."""
        parser = self._parser
        parser.feed(text)
        if last:
            parser.rest()
        spans, parser.spans = parser.spans, []
        return [(a - parser.begin, b - parser.begin) for a, b in spans]


def thoughts_end(template: Any, prefix: str) -> str | None:
    """What ends the reasoning that a prompt's end has begun; None where it has begun none."""
    return None if template is None else _AnswerParser(template, prefix, []).thoughts_end


class NamedCallParts:
    """All is the arguments of one function, in whatever pieces it comes, be it cut off."""

    def __init__(self, name: str):
        self._begun: list[Part] = [ToolCall(name, "")]

    def add(self, text: str, *, last: bool) -> list[Part]:
        found, self._begun = self._begun, []
        return [*found, MoreArguments(text)] if text else found


DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
"""Says where a value ends; a number may have more digits than Python takes."""


class CallsParts:
    """An array of calls, as of `Form.calls`: each of them when it is whole."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str, *, last: bool) -> list[Part]:
        found: list[Part] = []
        self._text += text
        # No call ends without one.
        while "}" in text and (begin := self._text.find("{")) >= 0:
            try:
                _, end = DECODER.raw_decode(self._text, begin)
            except (ValueError, RecursionError):
                break
            name, _, arguments = self._text[begin : end - 1].removeprefix(CALL_NAME).partition(CALL_ARGUMENTS)
            found.append(ToolCall(json.loads(name), arguments))
            self._text = self._text[end:]
        return found


def call_id() -> str:
    """A name for a call of a tool."""
    return f"call_{uuid.uuid4().hex[:24]}"
