"""The form that a body holds its answers to, and how such answers are cut into parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from llguidance import LLTokenizer

from megakv.serving.form import Form
from megakv.serving.http.chat_schemas import ChatBody, ResponseFormat, TextFormat
from megakv.serving.http.either import Opening
from megakv.serving.http.errors import ApiError
from megakv.serving.http.parts import CallsParts, NamedCallParts, Parts, PlainParts
from megakv.serving.http.response_schemas import ResponseBody
from megakv.serving.http.schemas import MOST_TOOLS, SamplingBody
from megakv.serving.http.structured import structured


@dataclass(frozen=True)
class Held:
    """The form of an answer, and how its text is cut into parts."""

    field: str
    """That asks for it."""
    form: Callable[[LLTokenizer], Form]
    """A ValueError says what cannot be."""
    parts: Callable[[], Parts]
    opening: str = ""
    """Unless it begins so: then it is cut as an answer that is held to nothing."""
    thinks: bool = False
    """Whether it is one behind reasoning."""


def held_to(
    body: SamplingBody, opening: Opening | None, given: TextFormat | ResponseFormat | None = None
) -> Held | None:
    """What a body asks for, None where an answer may be anything; an ApiError where fields do not go together.

    `opening` is what the model's calls begin with, where that is known.
    """
    tools = body if isinstance(body, ChatBody | ResponseBody) else None
    held = _calls(tools) if tools is not None and tools.must_call else None
    calls, asked = held, [Held(field, make, PlainParts) for field, make in structured(body).items()]
    for name in ("stop", "stop_token_ids"):
        if held is not None and getattr(body, name):
            raise _wrong(held.field, f"calls are not cut off by {name}; leave one of the two out")
    schema = None if given is None else given.schema_of_json
    if schema is not None:
        asked.append(Held("response_format", partial(Form.json, schema), PlainParts))
    if len(asked) > 1:
        names = " and ".join(each.field for each in asked)
        raise _wrong(asked[1].field, f"an answer is held to one thing, not to {names}; leave all but one out")
    seen = opening is None or opening.text != ""
    if asked and tools is not None and tools.functions and calls is None and seen:
        if schema is not None and opening is not None:
            asked = [Held("response_format", partial(Form.json_or, opening.lark, schema), PlainParts, opening.text)]
        else:
            raise _wrong(
                asked[0].field,
                "with tools an answer of this model cannot be either: say which by tool_choice; allowed: 'required', a "
                "named tool (then the answer is calls) or 'none' (then it is of this form)",
            )
    # Calls have no content that would be of a form.
    held = calls or (asked[0] if asked else None)
    for name in ("ignore_eos", "min_tokens"):
        if held is not None and getattr(body, name):
            raise _wrong(held.field, f"it does not go together with {name}; leave one of the two out")
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
