"""The bodies of requests, as OpenAI's clients send them. An unknown field is refused: it would change nothing."""

from __future__ import annotations

import json
from array import array
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

MOST_FIELDS = 128
MOST_STOPS = 16
MOST_BIASES = 1024
MOST_MESSAGES = 4096
MOST_TOOLS = 128
MOST_SETTINGS = 1 << 16
"""Letters of settings that come as JSON in a text."""
Text = Annotated[str, Field(max_length=1 << 26)]
Name = Annotated[str, Field(max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Token = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Tokens = Annotated[list[Token], Field(max_length=1 << 24, fail_fast=True), AfterValidator(lambda ids: array("i", ids))]
"""They become an array, which takes a ninth of a list's memory."""
TokenCount = Annotated[int, Field(ge=1, lt=1 << 31)]
Ignored = Annotated[Any, AfterValidator(lambda _: None)]
"""Of fields that say who asks or how to bill: nothing here goes by them, and nothing of them is kept."""


def at_most(entries: int) -> BeforeValidator:
    """For an object: looked at before its entries are, of which each may be wrong in several ways."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > entries:
            raise ValueError(f"has {len(value)} entries; allowed: {entries}")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """Types are taken as they are: no number from a text, no flag from a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        """Each unknown field would be an error of its own."""
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"has {len(value)} fields; allowed: {MOST_FIELDS}")
        return value

    @classmethod
    def read(cls, value: Any) -> Self:
        """Checked, from the values of its JSON."""
        return cls.model_validate(value)


class StreamOptions(Body):
    """What a stream has beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class SamplingBody(Body):
    """What all endpoints take."""

    model: Name
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(max_length=16)], Annotated[float, Field(ge=-100, le=100)]], at_most(MOST_BIASES)
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stops = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool = False
    compress_cache: bool = False
    prompt_lookup: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    user: Name | None = None
    metadata: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    service_tier: Ignored = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: allowed only where stream is true")
        return self


def _kind_of_prompt(given: Any) -> str:
    """By its first item: to try all kinds would take all items several times."""
    if not isinstance(given, list):
        return "text"
    first = given[0] if given else 0
    return "texts" if isinstance(first, str) else "lists of tokens" if isinstance(first, list) else "tokens"


class CompletionBody(SamplingBody):
    """Of ``/v1/completions``."""

    prompt: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[list[Text], Field(min_length=1, max_length=256, fail_fast=True), Tag("texts")]
        | Annotated[Tokens, Field(min_length=1), Tag("tokens")]
        | Annotated[list[Tokens], Field(min_length=1, max_length=256, fail_fast=True), Tag("lists of tokens")],
        Discriminator(_kind_of_prompt),
    ]
    max_tokens: TokenCount | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None


class SentBack(Body):
    """Answers come back with whatever fields a client's library has for them; those not known are passed over."""

    model_config = ConfigDict(extra="ignore")


class TextPart(SentBack):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


TEXT_PARTS = get_args(TextPart.model_fields["type"].annotation)


def _text_alone(content: Any) -> Any:
    """Refuse images, sound and files by what they are."""
    kinds = (part.get("type") for part in content if isinstance(part, dict)) if isinstance(content, list) else ()
    odd = next((kind for kind in kinds if isinstance(kind, str) and kind not in TEXT_PARTS), None)
    if odd is not None:
        raise ValueError(f"a part of type {odd[:40]!r} is not text, which is all that is read here; allowed: 'text'")
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

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content: a message of the role {self.role!r} needs text")
        return self

    def template_values(self) -> dict[str, Any]:
        """As chat templates take it."""
        values: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                values[name] = value
        if self.tool_calls:
            values["tool_calls"] = [
                {"id": call.id, "type": "function", "function": _arguments(call.function)} for call in self.tool_calls
            ]
        return values


def _arguments(call: FunctionCall) -> dict[str, Any]:
    """Templates print arguments as JSON, so that those which are must not be text here."""
    try:
        arguments = json.loads("{}" if call.arguments is None else call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"name": call.name, "arguments": arguments}


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
