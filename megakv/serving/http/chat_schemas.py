"""Bodies of ``/v1/chat/completions``, and what ``/v1/responses`` shares with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from megakv.serving.http.errors import shown
from megakv.serving.http.message_schemas import Function, Message, NamedTool, Tool
from megakv.serving.http.schemas import (
    MOST_FIELDS,
    MOST_MESSAGES,
    MOST_SETTINGS,
    MOST_TOOLS,
    Body,
    Ignored,
    Name,
    SamplingBody,
    Text,
    TokenCount,
    at_most,
)


def one_of(allowed: str) -> WrapValidator:
    """For a field of several kinds: what is allowed, in place of what each kind has against a value."""

    def check(value: Any, kinds: ValidatorFunctionWrapHandler) -> Any:
        try:
            return kinds(value)
        except ValidationError:
            raise ValueError(f"allowed: {allowed}; not {shown(value)}") from None

    return WrapValidator(check)


class ToolsBody(SamplingBody):
    """What both endpoints with tools take."""

    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def arguments(self) -> Iterator[str]:
        """Those of all calls that are sent back."""
        raise NotImplementedError

    @property
    def must_call(self) -> bool:
        """Whether an answer has to be calls of tools."""
        return self.tool_choice not in (None, "auto", "none")

    @property
    def named(self) -> str | None:
        """The function that an answer has to call, where it is a certain one."""
        return None if self.tool_choice is None or isinstance(self.tool_choice, str) else self.tool_choice.name


class JsonSchema(Body):
    """A schema by its name."""

    name: Name
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: Ignored = None


class _Format(Body):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _has_a_schema(self) -> _Format:
        if (self.type == "json_schema") != (self.given is not None):
            raise ValueError("a schema is there where the type is 'json_schema', and nowhere else")
        return self

    @property
    def given(self) -> dict[str, Any] | None:
        """The schema that comes with it."""
        raise NotImplementedError

    @property
    def schema_of_json(self) -> dict[str, Any] | None:
        """The schema that an answer's JSON is held to; None where it is any text."""
        return {"type": "object"} if self.type == "json_object" else self.given


class TextFormat(_Format):
    """A format as ``/v1/chat/completions`` has it."""

    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """Of any object, as other servers have it: the same as with a name."""

    @model_validator(mode="after")
    def _schema_of_an_object(self) -> TextFormat:
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("schema: stands in json_schema, or beside the type 'json_object'")
        return self

    @property
    def given(self) -> dict[str, Any] | None:
        return None if self.json_schema is None else self.json_schema.schema_ or {}

    @property
    def schema_of_json(self) -> dict[str, Any] | None:
        named = self.type == "json_object" and self.schema_ is not None
        return self.schema_ if named else super().schema_of_json


class ResponseFormat(_Format, JsonSchema):
    """A format as ``/v1/responses`` has it."""

    name: Name = ""

    @property
    def given(self) -> dict[str, Any] | None:
        return self.schema_


class ChatBody(ToolsBody):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedTool | None,
        one_of("""'auto', 'none', 'required' or {"type": "function", "function": {"name": NAME}}"""),
    ] = None
    response_format: TextFormat | None = None
    chat_template_kwargs: Annotated[dict[Name, bool | int | float | str | None], at_most(MOST_FIELDS)] | None = None
    reasoning_effort: Name | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    literal_specials: bool = False
    _merged: bool = PrivateAttr(False)
    # It is parsed where streams are written.
    generation_config: Annotated[str, Field(max_length=MOST_SETTINGS)] | None = None
    store: Ignored = None
    verbosity: Ignored = None

    @model_validator(mode="after")
    def _likeliest(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: allowed only where logprobs is true")
        return self

    @model_validator(mode="after")
    def _goes_on(self) -> ChatBody:
        goes_on, last = bool(self.continue_final_message), self.messages[-1:]
        if self.add_generation_prompt is not None and self.add_generation_prompt == goes_on:
            raise ValueError(
                "add_generation_prompt: an answer begins, or goes on with continue_final_message; name one"
            )
        if goes_on and not (last and last[0].role == "assistant" and last[0].content and not last[0].tool_calls):
            raise ValueError("continue_final_message: allowed only where the last message is an assistant's text")
        return self

    @property
    def merged(self) -> bool:
        """Whether messages were merged for the model's template."""
        return self._merged

    @merged.setter
    def merged(self, merged: bool) -> None:
        self._merged = merged

    @property
    def functions(self) -> list[Function]:
        """That the model is told of."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or []]

    @property
    def arguments(self) -> Iterator[str]:
        """As of `ToolsBody`."""
        calls = (call for message in self.messages for call in message.tool_calls or [])
        return (call.function.arguments for call in calls if call.function.arguments is not None)
