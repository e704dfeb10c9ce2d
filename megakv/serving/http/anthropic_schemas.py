"""Bodies of ``/v1/messages``, as Anthropic's clients send them, and what they are as bodies of chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from megakv.serving.http.chat_schemas import ChatBody
from megakv.serving.http.message_schemas import SentBack
from megakv.serving.http.schemas import (
    MOST_FIELDS,
    MOST_MESSAGES,
    MOST_STOPS,
    MOST_TOOLS,
    Name,
    SamplingBody,
    Stop,
    Text,
    TokenCount,
)

BILLING = "x-anthropic-billing-header:"
"""Begins a block of the system's that Claude Code writes anew for each request: with it no prefix would be found."""
OWN_TOOLS = (None, "custom")
"""Types of tools that clients run; all others are the server's to run, or have a schema that it alone knows."""
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Chat templates know three."""


class TextBlock(SentBack):
    """A text."""

    type: Literal["text"]
    text: Text


class CallBlock(SentBack):
    """A call that an earlier answer asked for."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ThinkingBlock(SentBack):
    """What an earlier answer thought."""

    type: Literal["thinking"]
    thinking: Text


class HiddenBlock(SentBack):
    """What another server's answer thought, which only that one can read."""

    type: Literal["redacted_thinking"]


def _only(*kinds: str) -> BeforeValidator:
    """For blocks: names the first that is of none of these types, such as an image."""

    def check(content: Any) -> Any:
        found = (block.get("type") for block in content if isinstance(block, dict)) if isinstance(content, list) else ()
        odd = next((kind for kind in found if isinstance(kind, str) and kind not in kinds), None)
        if odd is not None:
            allowed = ", ".join(map(repr, kinds))
            raise ValueError(f"a block of type {odd[:40]!r} is not read here; allowed: {allowed}")
        return content

    return BeforeValidator(check)


Texts = Annotated[Text | Annotated[list[TextBlock], Field(fail_fast=True)], _only("text")]


class ResultBlock(SentBack):
    """What a call came to."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Texts | None = None

    def message(self) -> dict[str, Any]:
        """As a message of a chat."""
        text = "" if self.content is None else _joined(self.content, "")
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text}


Block = Annotated[
    TextBlock | CallBlock | ResultBlock | ThinkingBlock | HiddenBlock,
    Field(discriminator="type"),
]


class GivenMessage(SentBack):
    """A message in blocks."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Text | Annotated[list[Block], Field(fail_fast=True)],
        _only("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
    ]

    def messages(self) -> Iterator[dict[str, Any]]:
        """As messages of a chat: results of calls are messages of their own there."""
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        message: dict[str, Any] = {}
        for block in blocks:
            if isinstance(block, ResultBlock):
                if message:
                    yield message
                    message = {}
                yield block.message()
                continue
            message = message or {"role": self.role, "content": ""}
            if isinstance(block, TextBlock):
                message["content"] += block.text
            elif isinstance(block, ThinkingBlock):
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            elif isinstance(block, CallBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls = message.setdefault("tool_calls", [])
                calls.append({"id": block.id, "type": "function", "function": function})
        if message or not blocks:
            yield message or {"role": self.role, "content": ""}


class GivenTool(SentBack):
    """A tool, of a client's own or a server's."""

    name: Name = ""
    type: Name | None = None
    description: Text | None = None
    input_schema: dict[str, Any] | None = None


class GivenChoice(SentBack):
    """Whether tools have to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def of_chats(self) -> Any:
        """As chat completions have it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return {"any": "required"}.get(self.type, self.type)


class GivenThinking(SentBack):
    """Whether to think first."""

    type: Name


class GivenFormat(SentBack):
    """A schema that an answer is held to."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class GivenOutput(SentBack):
    """How an answer is to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: GivenFormat | None = None


def _lasting(system: Any) -> Any:
    """Leave out what is there for Anthropic's accounts alone."""
    if isinstance(system, str):
        return "" if system.startswith(BILLING) and "\n" not in system else system
    return [block for block in system or [] if not block.text.lstrip().startswith(BILLING)]


class GivenBody(SamplingBody):
    """A body as it comes. Fields that are not known are passed over: clients send what newer servers have."""

    model_config = ConfigDict(extra="ignore")

    messages: Annotated[list[GivenMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_tokens: TokenCount | None = None
    system: Annotated[Texts | None, AfterValidator(_lasting)] = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    tools: Annotated[list[GivenTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: GivenChoice | None = None
    thinking: GivenThinking | None = None
    output_config: GivenOutput | None = None

    def chat(self) -> dict[str, Any]:
        """The same as a body of chat completions."""
        values = self.model_dump(
            include=SamplingBody.model_fields.keys() - {"stop", "stream_options"}, exclude_unset=True, by_alias=True
        )
        system = _joined(self.system, "\n\n") if self.system else ""
        messages = [{"role": "system", "content": system}] if system else []
        values["messages"] = [*messages, *(each for message in self.messages for each in message.messages())]
        values["max_tokens"] = self.max_tokens
        values["stop"] = self.stop_sequences or self.stop
        tools = self.tools or []
        values["tools"] = [_function(tool) for tool in tools if tool.type in OWN_TOOLS] or None
        values["omitted_tools"] = [tool.name or tool.type for tool in tools if tool.type not in OWN_TOOLS]
        if (choice := self.tool_choice) is not None:
            values["tool_choice"] = choice.of_chats()
            values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            values["chat_template_kwargs"] = {"enable_thinking": self.thinking.type == "enabled"}
        if (output := self.output_config) is not None:
            values["reasoning_effort"] = None if output.effort is None else EFFORTS[output.effort]
            if output.format is not None:
                schema = {"name": "answer", "schema": output.format.schema_}
                values["response_format"] = {"type": "json_schema", "json_schema": schema}
        return values


class MessagesBody(ChatBody):
    """Of ``/v1/messages``, once it is one of chat completions."""

    omitted_tools: Annotated[list[Name], Field(max_length=MOST_FIELDS)]
    """Names of those that this server would have to run."""

    @classmethod
    def names(cls) -> frozenset[str]:
        """Fields of the JSON that clients send."""
        return GivenBody.names()

    @classmethod
    def read(cls, value: Any) -> MessagesBody:
        """Read a body as clients send it, and make one of chat completions of it."""
        return cls.model_validate(GivenBody.model_validate(value).chat())


def _function(tool: GivenTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _joined(content: str | list[TextBlock], between: str) -> str:
    return content if isinstance(content, str) else between.join(block.text for block in content)
