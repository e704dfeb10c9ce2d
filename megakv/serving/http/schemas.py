"""The bodies of requests, as OpenAI's clients send them. `fields` says what becomes of fields that are not here."""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Literal, Self

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


def whole_letters(text: str) -> str:
    """A text with question marks for halves of letters, which JSON may have and UTF-8 has not."""
    return text.encode(errors="replace").decode()


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

    @classmethod
    def names(cls) -> frozenset[str]:
        """Fields of its JSON."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def read(cls, value: Any) -> Self:
        """Checked, from the values of its JSON."""
        return cls.model_validate(value)


class StreamOptions(Body):
    """What a stream has beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


Grammar = Annotated[str, Field(min_length=1, max_length=1 << 16)]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=1 << 16)]], Field(min_length=1, max_length=1024)]


class StructuredOutputs(Body):
    """What an answer is held to, as vLLM has it: one of these."""

    model_config = ConfigDict(extra="forbid")

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
