"""Messages, calls and tools of conversations, as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from megakv.serving.http.schemas import MOST_TOOLS, Body, Ignored, Name, Text


class SentBack(Body):
    """Answers come back with whatever fields a client's library has for them; those not known are passed over."""


class TextPart(SentBack):
    """A part of a message; a refusal is text that the model wrote."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _refusal(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "refusal" and "text" not in value:
            return {"type": "refusal", "text": value.get("refusal")}
        return value


TEXT_PARTS = get_args(TextPart.model_fields["type"].annotation)
OTHER_PARTS = {"image": "images", "audio": "sound", "video": "videos", "file": "files", "document": "files"}
"""Kinds of parts by a word in their names."""


def _text_alone(content: Any) -> Any:
    """Refuse images, sound and files by what they are."""
    kinds = (part.get("type") for part in content if isinstance(part, dict)) if isinstance(content, list) else ()
    odd = next((kind for kind in kinds if isinstance(kind, str) and kind not in TEXT_PARTS), None)
    if odd is not None:
        what = next((what for what in OTHER_PARTS if what in odd), None)
        said = f"this server reads text only, no {OTHER_PARTS[what]}" if what else "this is no kind of part"
        raise ValueError(f"{odd[:40]}: {said}; allowed: parts of the type 'text'")
    return content


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


Content = Annotated[
    Text | Annotated[list[TextPart], Field(fail_fast=True)], AfterValidator(_joined), BeforeValidator(_text_alone)
]
"""A text, of parts too."""


class FunctionCall(SentBack):
    """What the model asked to be called."""

    name: Name
    arguments: Text | None = None


class ToolCall(SentBack):
    """A call in an answer of before."""

    id: Name | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


def _as_reasoning(value: Any) -> Any:
    """Texts of reasoning by the names and kinds that libraries have for them: one, or blocks of them."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else None
    texts = [block.get("thinking", block.get("text")) for block in value if isinstance(block, dict)]
    return "".join(text for text in texts if isinstance(text, str)) or None


class Message(SentBack):
    """One of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_call_id: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    reasoning_content: Text | None = None
    # These say something, where they are there, that no template is told of.
    audio: None = None
    function_call: None = None

    @model_validator(mode="before")
    @classmethod
    def _as_sent_back(cls, value: Any) -> Any:
        """What answers and other libraries call by other names."""
        if not isinstance(value, dict) or value.get("role") != "assistant":
            return value
        more: dict[str, Any] = {}
        if value.get("reasoning_content") is None:
            found = (_as_reasoning(value.get(name)) for name in ("reasoning", "thinking_blocks"))
            more["reasoning_content"] = next((text for text in found if text), None)
        if value.get("content") in (None, []) and isinstance(value.get("refusal"), str):
            more["content"] = value["refusal"]
        return {**value, **more}

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content: a message of the role {self.role!r} needs text")
        return self

    def template_values(self) -> dict[str, Any]:
        """Message as `ChatTemplate` takes it: as it was sent."""
        values: dict[str, Any] = {"role": self.role, "content": self.content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                values[name] = value
        if self.tool_calls:
            values["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in self.tool_calls
            ]
        return values


class Function(Body):
    """That the model may ask to be called."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Ignored = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """What arguments are held to: an object, and one of nothing where there are no parameters, as OpenAI has it."""
        return {"type": "object", **({"additionalProperties": False} if self.parameters is None else self.parameters)}

    def template_values(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {"type": "function", "function": self.model_dump(exclude_none=True, exclude={"type", "strict"})}


class Tool(Body):
    """A tool of ``/v1/chat/completions``."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Of one of the tools."""

    name: Name


class NamedTool(Body):
    """That an answer has to call, as ``/v1/chat/completions`` has it."""

    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.name
