"""The bodies of ``/v1/responses``, which has its own names for what ``/v1/chat/completions`` takes too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megakv.serving.http.schemas import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Body,
    Content,
    Function,
    FunctionName,
    Ignored,
    JsonSchema,
    Name,
    SentBack,
    Text,
    TokenCount,
    ToolsBody,
    one_of,
)


class ResponseFormat(JsonSchema):
    """Text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name = ""

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema: is there where the type is 'json_schema', and nowhere else")
        return self

    @property
    def schema_of_json(self) -> dict[str, Any] | None:
        """As of `TextFormat`."""
        return {"type": "object"} if self.type == "json_object" else self.schema_


class ResponseText(Body):
    """How a response's text is to look."""

    format: ResponseFormat | None = None
    verbosity: Ignored = None


class ResponseMessage(SentBack):
    """A message of ``/v1/responses``."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ResponseCall(SentBack):
    """A call that an earlier response asked for."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text


class ResponseCallOutput(SentBack):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Text


class ResponseTool(Function):
    """A tool of ``/v1/responses``."""

    type: Literal["function"]


class ResponseNamedTool(FunctionName):
    """That an answer has to call."""

    type: Literal["function"]


class ResponseBody(ToolsBody):
    """Of ``/v1/responses``."""

    input: (
        Text
        | Annotated[
            list[ResponseMessage | ResponseCall | ResponseCallOutput],
            Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
        ]
    )
    instructions: Text | None = None
    previous_response_id: Name | None = None
    max_output_tokens: TokenCount | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | ResponseNamedTool | None,
        one_of("""'auto', 'none', 'required' or {"type": "function", "name": NAME}"""),
    ] = None
    text: ResponseText | None = None
    store: bool | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: Ignored = None
    reasoning: Ignored = None

    @property
    def functions(self) -> list[Function]:
        """That the model is told of."""
        return [] if self.tool_choice == "none" else list(self.tools or [])

    @property
    def arguments(self) -> Iterator[str]:
        """As of `ToolsBody`."""
        items = [] if isinstance(self.input, str) else self.input
        return (item.arguments for item in items if isinstance(item, ResponseCall))
