"""Bodies of ``/v1/responses``, which has its own names for what chat completions take too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from megakv.serving.http.chat_schemas import ResponseFormat, ToolsBody, one_of
from megakv.serving.http.message_schemas import Content, Function, FunctionName, SentBack
from megakv.serving.http.schemas import MOST_MESSAGES, MOST_TOOLS, Body, Ignored, Name, Text, TokenCount

LOGPROBS = "message.output_text.logprobs"
"""What `include` has where log probabilities are asked for."""
ONE_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a custom tool, which takes any text."""


class ResponseText(Body):
    """How a response's text is to look."""

    format: ResponseFormat | None = None
    verbosity: Ignored = None


class ResponseMessage(SentBack):
    """A message of ``/v1/responses``."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ReasoningPart(SentBack):
    """A piece of what an answer thought, or of what was summed up of it."""

    text: Text


class ResponseReasoning(SentBack):
    """What an earlier answer thought."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None
    summary: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        """All of it; the summary where there is no more."""
        return "".join(part.text for part in self.content or self.summary or [])


class ResponseCall(SentBack):
    """A call that an earlier response asked for."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text


class ResponseCustomCall(SentBack):
    """A call of a custom tool that an earlier response asked for."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: Text


class ResponseCallOutput(SentBack):
    """What a call came to."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: Content


def _type_of(given: Any) -> str | None:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return kind[:40] if isinstance(kind, str) else None


def _kind_of_item(given: Any) -> str:
    """By its type; a message may have none."""
    return _type_of(given) or "message"


Item = Annotated[
    Annotated[ResponseMessage, Tag("message")]
    | Annotated[ResponseReasoning, Tag("reasoning")]
    | Annotated[ResponseCall, Tag("function_call")]
    | Annotated[ResponseCustomCall, Tag("custom_tool_call")]
    | Annotated[ResponseCallOutput, Tag("function_call_output")]
    | Annotated[ResponseCallOutput, Tag("custom_tool_call_output")],
    Discriminator(_kind_of_item),
]


class ResponseTool(Function):
    """A function of ``/v1/responses``."""

    type: Literal["function"]


class CustomTool(SentBack):
    """A tool that takes a text of any form."""

    type: Literal["custom"]
    name: Name
    description: Text | None = None

    def function(self) -> Function:
        """As a function of one text."""
        return Function(name=self.name, description=self.description, parameters=ONE_TEXT)


class BuiltInTool(SentBack):
    """A tool that the server would have to run: there are none here."""

    type: Name


def _kind_of_tool(given: Any) -> str:
    kind = _type_of(given) or "function"
    return kind if kind in ("function", "custom") else "built-in"


AnyTool = Annotated[
    Annotated[ResponseTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[BuiltInTool, Tag("built-in")],
    Discriminator(_kind_of_tool),
]


class ResponseNamedTool(FunctionName):
    """That an answer has to call."""

    type: Literal["function", "custom"]


class ReasoningOptions(SentBack):
    """How much to think."""

    effort: Name | None = None


class ResponseBody(ToolsBody):
    """Of ``/v1/responses``."""

    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    previous_response_id: Name | None = None
    max_output_tokens: TokenCount | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | ResponseNamedTool | None,
        one_of("""'auto', 'none', 'required' or {"type": "function", "name": NAME}"""),
    ] = None
    text: ResponseText | None = None
    store: bool | None = None
    background: Literal[False] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[Name], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning: ReasoningOptions | None = None

    @property
    def functions(self) -> list[Function]:
        """That the model is told of."""
        if self.tool_choice == "none":
            return []
        found = (tool.function() if isinstance(tool, CustomTool) else tool for tool in self.tools or [])
        return [tool for tool in found if isinstance(tool, Function)]

    @property
    def custom(self) -> set[str]:
        """Names of custom tools."""
        return {tool.name for tool in self.tools or [] if isinstance(tool, CustomTool)}

    @property
    def omitted(self) -> list[str]:
        """Types of tools that the model is not told of."""
        return [tool.type for tool in self.tools or [] if isinstance(tool, BuiltInTool)]

    @property
    def logprobs(self) -> int | None:
        """How many log probabilities each token has beside its own; None where it has none."""
        return (self.top_logprobs or 0) if self.top_logprobs or LOGPROBS in (self.include or []) else None

    @property
    def arguments(self) -> Iterator[str]:
        """As of `ToolsBody`."""
        items = [] if isinstance(self.input, str) else self.input
        return (item.arguments for item in items if isinstance(item, ResponseCall))

    @property
    def template_options(self) -> dict[str, Any]:
        """What the chat template is told beside messages and tools."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return {} if effort is None else {"reasoning_effort": effort}
