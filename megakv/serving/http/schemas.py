"""The bodies of requests, as OpenAI's clients send them. `fields` says what becomes of fields that are not here."""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)

MOST_FIELDS = 128
MOST_STOPS = 16
MOST_BIASES = 1024
MOST_STOP_IDS = 1024
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
NO_LIMIT = (1 << 31) - 1
"""Tokens of an answer that has as many as there may be."""
TokenCount = Annotated[int, Field(ge=-1), AfterValidator(lambda most: NO_LIMIT if most == -1 else min(most, NO_LIMIT))]
"""The most tokens of an answer: above what can be, that; -1 is no limit, 0 reads the prompt alone."""
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

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, hide_input_in_errors=True)
    _passed: dict[str, int] = PrivateAttr(default_factory=dict)

    @property
    def passed(self) -> dict[str, int]:
        """How many fields of its JSON were passed over, by why."""
        return self._passed

    def note_passed(self, passed: dict[str, int]) -> None:
        """Keep how many fields of its JSON were passed over."""
        self._passed = passed

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        """Fields beyond a number are nobody's."""
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"has {len(value)} fields; allowed: {MOST_FIELDS}")
        return value


class StreamOptions(Body):
    """What a stream has beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


Grammar = Annotated[str, Field(min_length=1, max_length=1 << 16)]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=1 << 16)]], Field(min_length=1, max_length=1024)]


class StructuredOutputs(Body):
    """What an answer is held to, as vLLM has it: one of these."""

    json_: dict[str, Any] | Grammar | None = Field(default=None, alias="json")
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None


class SamplingBody(Body):
    """What all endpoints take."""

    model: Name | None = None
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
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_STOP_IDS, fail_fast=True)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    # By the names that they had before.
    guided_json: dict[str, Any] | Grammar | None = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
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


def _no_suffix(given: Any) -> None:
    if given not in (None, ""):
        raise ValueError("models here write on from their prompt; allowed: none, with the model's own marks in prompt")


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
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    add_special_tokens: Literal[True] | None = None
    suffix: Annotated[Any, AfterValidator(_no_suffix)] = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None

    @property
    def scores(self) -> int | None:
        """Likeliest tokens that are told beside each of the prompt's, where those have log probabilities."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((each for each in wanted if each is not None), default=None)

    @model_validator(mode="after")
    def _answers_are_not_ranked(self) -> CompletionBody:
        if self.best_of not in (None, n := self.n or 1):
            raise ValueError(f"best_of: {self.best_of} answers are not ranked here; allowed: n, which is {n}")
        return self


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
