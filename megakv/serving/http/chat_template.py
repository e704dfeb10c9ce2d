"""A model's chat template, and what it takes: texts or parts, arguments as objects or texts, which roles where."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

Messages: TypeAlias = list[dict[str, Any]]
PROBE = "Zq7vX"
"""A text that no template has of its own."""
ARGUMENTS = json.dumps({PROBE: "b"})
BETWEEN = "\n\n"
"""Texts of two messages that became one."""
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
TURNS: dict[str, Callable[[Any], Messages]] = {
    "system": lambda content: [{"role": "system", "content": content}, USER],
    "user": lambda content: [{"role": "user", "content": content}],
    "assistant": lambda content: [USER, {"role": "assistant", "content": content}, USER],
    "tool": lambda content: [USER, _call({PROBE[::-1]: "a"}, ""), _result(content)],
}
"""Conversations that show what becomes of a role's content."""


@dataclass(frozen=True)
class Traits:
    """What a template does with small conversations."""

    parts: frozenset[str]
    """Roles whose content it reads as a list of parts."""
    text_arguments: bool
    """Whether it writes arguments of calls right from their text alone."""
    none_content: bool
    """Whether it asks if a call comes without text."""
    drops_results: bool
    """Whether what tools came to is not in its text."""


class ChatTemplate:
    """Writes conversations as the model's tokenizer says."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer

    def text(
        self, messages: Messages, tools: list[dict[str, Any]], options: dict[str, Any], *, goes_on: bool = False
    ) -> tuple[str, bool]:
        """A conversation up to where its next answer begins, or goes on; and whether messages were merged for it.

        What the template raises about the messages as they are is raised where no other order helps.
        """
        # Templates know the older name alone.
        given = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        first: Exception | None = None
        for tried, merged in _ways(given):
            try:
                return self._text([self._fitted(each) for each in tried], tools, options, goes_on=goes_on), merged
            except Exception as error:  # whatever a template raises
                first = first or error
        assert first is not None
        raise first

    @cached_property
    def traits(self) -> Traits:
        """What it takes, as far as it can be seen."""
        found = {role: self._probed(turns(PROBE)) for role, turns in TURNS.items()}
        lists = {role: self._probed(turns(_parts(PROBE))) for role, turns in TURNS.items()}
        parts = frozenset(role for role in TURNS if PROBE not in found[role] and PROBE in lists[role])
        arguments = json.loads(ARGUMENTS)
        # A template that has not heard of objects prints them as Python does, or adds texts to them in vain.
        objects, texts = ([self._called(value, content) for content in ("", None)] for value in (arguments, ARGUMENTS))
        knows = any(PROBE in text and repr(arguments) not in text for text in objects)
        text_arguments = not knows and any(PROBE in text for text in texts)
        empty, none = texts if text_arguments else objects
        none_content = none not in ("", empty) and none.count("None") <= empty.count("None")
        drops_results = PROBE in found["user"] + lists["user"] and PROBE not in found["tool"] + lists["tool"]
        return Traits(parts, text_arguments, none_content, drops_results)

    def _called(self, arguments: Any, content: str | None) -> str:
        return self._probed([USER, _call(arguments, content), _result("a")])

    def _probed(self, messages: Messages) -> str:
        """Text of a conversation; none where the template has something against it, with a tool and without."""
        for tools in ([TOOL], []):
            with suppress(Exception):  # whatever a template raises
                return self._text(messages, tools, {})
        return ""

    def _text(
        self, messages: Messages, tools: list[dict[str, Any]], options: dict[str, Any], *, goes_on: bool = False
    ) -> str:
        how: dict[str, Any] = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on, **options}
        if all(message["content"] is not None for message in messages):
            text: str = self._tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **how)
            return text
        # That one leaves out what is None, so that a template which asks for it would find nothing to ask.
        template = self._tokenizer.get_chat_template(None, tools or None)
        values = {**self._tokenizer.special_tokens_map, **how}
        (text,), _ = render_jinja_template([messages], tools=tools or None, chat_template=template, **values)
        return text

    def _fitted(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the template takes it."""
        traits, content, calls = self.traits, message.get("content"), message.get("tool_calls")
        if content is None and not (calls and traits.none_content):
            content = ""
        if isinstance(content, str) and message["role"] in traits.parts:
            content = _parts(content)
        if not calls:
            return {**message, "content": content}
        fitted = [{**call, "function": self._fitted_call(call["function"])} for call in calls]
        return {**message, "content": content, "tool_calls": fitted}

    def _fitted_call(self, function: dict[str, Any]) -> dict[str, Any]:
        arguments = function.get("arguments")
        if not self.traits.text_arguments:
            return {**function, "arguments": arguments_of(arguments)}
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        return {**function, "arguments": "{}" if arguments.strip() in ("", "null") else arguments}


def arguments_of(given: Any) -> Any:
    """Value of a call's arguments: an object where they are one, and of nothing where there are none."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError):
            return given
    return {} if given is None else given


def _ways(messages: Messages) -> Iterator[tuple[Messages, bool]]:
    """A conversation as it is, then with less and less that a template may refuse; whether messages were merged."""
    tried = [messages]
    yield messages, False
    objects = [_with_objects(each) for each in messages]
    for way in (objects, _merged(objects), _merged(_system_first(objects)), _merged(_without_system(objects))):
        if way not in tried:
            tried.append(way)
            yield way, way is not objects


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are no object are the one entry of one: templates go through them by name."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = arguments_of(call["function"].get("arguments"))
        if not isinstance(arguments, dict):
            call = {**call, "function": {**call["function"], "arguments": {"arguments": arguments}}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _merged(messages: Messages) -> Messages:
    """What one role says in a row as one message; results of tools stay what they are."""
    found: Messages = []
    for message in messages:
        if found and message["role"] == found[-1]["role"] != "tool":
            before = found[-1]
            texts = {name: _joined(before.get(name), message.get(name)) for name in ("content", "reasoning_content")}
            calls = [*(before.get("tool_calls") or []), *(message.get("tool_calls") or [])]
            more = {name: value for name, value in [*texts.items(), ("tool_calls", calls)] if value}
            found[-1] = {**before, **more}
        else:
            found.append(message)
    return found


def _system_first(messages: Messages) -> Messages:
    system = [each for each in messages if each["role"] == "system"]
    return [*system, *(each for each in messages if each["role"] != "system")]


def _without_system(messages: Messages) -> Messages:
    """Its text before the user's: some models know no such role."""
    return [{**each, "role": "user"} if each["role"] == "system" else each for each in _system_first(messages)]


def _joined(*texts: str | None) -> str:
    return BETWEEN.join(text for text in texts if text)


def _parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def _call(arguments: Any, content: str | None) -> dict[str, Any]:
    # Mistral's templates take ids of nine letters alone.
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
    }


def _result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": content}
