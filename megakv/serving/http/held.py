"""What an answer is held to, by `response_format` or by `tool_choice`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from llguidance import LLTokenizer

from megakv.serving.form import Form
from megakv.serving.http.errors import ApiError
from megakv.serving.http.parts import CallsParts, NamedCallParts, Parts, PlainParts
from megakv.serving.http.response_schemas import ResponseBody, ResponseFormat
from megakv.serving.http.schemas import MOST_TOOLS, ChatBody, TextFormat


@dataclass(frozen=True)
class Held:
    """The form of an answer, and how its text is cut into parts."""

    field: str
    """That asks for it."""
    form: Callable[[LLTokenizer], Form]
    """A ValueError says what cannot be."""
    parts: Callable[[], Parts]


def held_to(body: ChatBody | ResponseBody, given: TextFormat | ResponseFormat | None) -> Held | None:
    """What a body asks for, None where an answer may be anything; an ApiError where fields do not go together."""
    held = _calls(body) if body.must_call else None
    if held is not None and body.stop:
        raise _wrong(held.field, "calls are not cut off by stop; leave one of the two out")
    schema = None if given is None else given.schema_of_json
    if schema is not None:
        if body.functions:
            raise _wrong("response_format", "JSON is not answered together with tools; leave one of the two out")
        held = Held("response_format", partial(Form.json, schema), PlainParts)
    if held is not None and body.ignore_eos:
        raise _wrong(held.field, "it does not go together with ignore_eos; leave one of the two out")
    return held


def _calls(body: ChatBody | ResponseBody) -> Held:
    name, functions = body.named, [(each.name, each.schema_of_arguments) for each in body.functions]
    if not functions:
        raise _wrong("tool_choice", "there are no tools to call; give some, or leave it out")
    if name is None:
        most = 1 if body.parallel_tool_calls is False else MOST_TOOLS
        return Held("tool_choice", partial(Form.calls, functions, most=most), CallsParts)
    schema = dict(functions).get(name)
    if schema is None:
        names = ", ".join(repr(known) for known, _ in functions)
        raise _wrong("tool_choice", f"{name!r} is none of the tools; allowed: {names}")
    return Held("tool_choice", partial(Form.arguments, name, schema), partial(NamedCallParts, name))


def _wrong(field: str, message: str) -> ApiError:
    return ApiError(400, f"{field}: {message}", code="invalid_value", param=field)
