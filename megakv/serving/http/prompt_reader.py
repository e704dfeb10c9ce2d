"""From the bytes of a request to the tokens of its prompts. This file needs no torch: a process of its own runs it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from megakv.serving.http.chat_schemas import ChatBody, ToolsBody
from megakv.serving.http.chat_template import ChatTemplate
from megakv.serving.http.errors import ApiError, too_long
from megakv.serving.http.fields import pass_over
from megakv.serving.http.literal import LiteralSpecials
from megakv.serving.http.response_schemas import ResponseBody
from megakv.serving.http.schemas import Body, CompletionBody, whole_letters
from megakv.serving.http.wrong_fields import wrong_fields

LEAST_VALUES = 1 << 16
"""Values that any body may have: long conversations in parts, tools with large schemas."""
LEAST_LETTERS = 256 << 10
"""Bytes of text that any body may have: what is no prompt, too."""
MOST_KEYS = 1 << 16
MOST_DEPTH = 128
MOST_ARGUMENTS = 1 << 17
"""Values in the arguments of all calls of a conversation, which are JSON in texts."""
PIECE_LETTERS = 1 << 16
NO_LIMIT = 1 << 62
BYTES_OF_A_LETTER = 6
"""A letter may be written as \\uXXXX."""
MOST_LISTS = 2
"""Prompts of a whole context that one body may give as tokens; shorter ones may be more."""
UNKNOWN_CONTEXT = 1 << 20
"""Tokens taken for the context of a model that names none."""
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
OPENING = np.zeros(256, np.int64)
OPENING[list(b"[{")], OPENING[list(b"]}")] = 1, -1


@dataclass(frozen=True)
class BodyLimits:
    """The most values, keys, levels and bytes of text that one body has, for a model's context."""

    values: int
    letters: int
    context: int
    keys: int = MOST_KEYS
    depth: int = MOST_DEPTH

    @classmethod
    def of(cls, context: int | None, longest_token: int, prompts: int, *, numbers: bool) -> BodyLimits:
        """Room for so many prompts, each with the letters of a token at every position, and where `numbers` may be
        given, for two with those: a number is an object until its list is an array, five times its bytes in the body.
        """
        context = context or UNKNOWN_CONTEXT
        letters = LEAST_LETTERS + prompts * context * longest_token * BYTES_OF_A_LETTER
        return cls(LEAST_VALUES + (min(prompts, MOST_LISTS) * context if numbers else 0), letters, context)


class BodyScanner:
    """Counts what a body of JSON has, part by part; an ApiError with the first part that passes a limit.

    A part takes a few milliseconds per MiB, whatever is in it. What is no JSON is counted in some way: it is refused by
    whoever parses it.
    """

    def __init__(self, limits: BodyLimits):
        self._limits = limits
        self._values = self._keys = self._letters = self._depth = 0
        self._quoted = False
        self._rest = b""  # A backslash at the end of a part, whose letter is in the next one.

    @property
    def values(self) -> int:
        """Values so far, about."""
        return self._values

    def add(self, part: bytes) -> None:
        """Count a part of the body."""
        part = self._rest + part
        self._rest = b""
        if b"\\" in part:
            part = part.replace(b"\\\\", b"..").replace(b'\\"', b"..")
            if part.endswith(b"\\"):
                part, self._rest = part[:-1], b"\\"
        pieces = part.split(b'"')
        outside = b"".join(pieces[self._quoted :: 2])
        quotes = len(pieces) - 1
        self._quoted ^= quotes % 2 == 1
        self._letters += len(part) - len(outside) - quotes
        self._keys += outside.count(b":")
        self._values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        deepest = self._depth
        if brackets := outside.translate(None, NOT_BRACKETS):
            depths = self._depth + OPENING[np.frombuffer(brackets, np.uint8)].cumsum()
            deepest, self._depth = int(depths.max()), int(depths[-1])
        self._check("levels of arrays and objects", deepest, self._limits.depth)
        self._check("keys", self._keys, self._limits.keys)
        self._check("values", self._values, self._limits.values)
        if self._letters > self._limits.letters:
            raise _last(too_long(f"a body with more than {self._limits.letters} bytes of text", self._limits.context))

    def _check(self, what: str, found: int, most: int) -> None:
        if found > most:
            raise _last(ApiError(400, f"the body has more than {most} {what}, the most that is taken", code="too_many"))


def check_arguments(texts: Iterable[str]) -> None:
    """Refuse calls that were sent back and have too many values: templates get them parsed."""
    values, none = 0, BodyLimits(*[NO_LIMIT] * 5)
    for text in texts:
        scanner = BodyScanner(none)
        for begin in range(0, len(text), PIECE_LETTERS):
            scanner.add(text[begin : begin + PIECE_LETTERS].encode(errors="replace"))
        values += scanner.values
        if values > MOST_ARGUMENTS:
            message = f"the arguments of all calls have more than {MOST_ARGUMENTS} values, the most that is taken"
            raise ApiError(400, message, code="too_many")


def _last(error: ApiError) -> ApiError:
    """Nobody reads the rest of the body."""
    return replace(error, headers={"connection": "close"})


USUAL_LETTERS = 4
"""Letters of a token in most texts: a text with more of them than the context holds is first counted in pieces."""
MARGIN = 1.25
"""Tokens in pieces over tokens as a whole, at most: pieces differ at their ends alone."""
ANYWHERE = frozenset(name for kind in (ChatBody, CompletionBody, ResponseBody) for name in kind.model_fields)
B = TypeVar("B", bound=Body)


@dataclass(frozen=True)
class PromptReader:
    """Reads bodies and makes tokens of texts, for one model. Whatever is wrong is an ApiError."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    context: int | None
    vocabulary: int

    @cached_property
    def longest_token(self) -> int:
        """Letters that a token stands for at most."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    @cached_property
    def template(self) -> ChatTemplate:
        """Writes conversations."""
        return ChatTemplate(self.tokenizer)

    def read(self, kind: type[B], content: bytearray) -> tuple[B, list[array[int]]]:
        """A body without its texts, and the tokens of its prompts; none of one whose texts are kept."""
        body = self.read_body(kind, content)
        if isinstance(body, CompletionBody):
            return body if body.echo else body.model_copy(update={"prompt": ""}), self.prompts(body)
        if isinstance(body, ChatBody):
            prompts = self.prompts(body)
            return body.model_copy(update={"messages": []}), prompts
        return body, []

    def read_body(self, kind: type[B], content: bytearray) -> B:
        """A body from its JSON, of which nothing is left."""
        try:
            value = from_json(content)
        except ValueError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
        content.clear()
        passed = pass_over(value, kind, ANYWHERE)
        try:
            body = kind.read(value)
        except ValidationError as error:
            raise wrong_fields(error, value) from None
        body.note_passed(passed)
        if isinstance(body, ToolsBody):
            check_arguments(body.arguments)
        return body

    def prompts(self, body: CompletionBody | ChatBody) -> list[array[int]]:
        """The tokens of what a body asks to be gone on from."""
        if isinstance(body, CompletionBody):
            given: Any = body.prompt if isinstance(body.prompt, list) else [body.prompt]
            return [self.encode(each) if isinstance(each, str) else self._checked(each) for each in given]
        options: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            options["reasoning_effort"] = body.reasoning_effort
        messages = [message.template_values() for message in body.messages]
        tools = [function.template_values() for function in body.functions]
        goes_on = bool(body.continue_final_message)
        literal = body.literal_specials
        tokens, body.merged = self.conversation(messages, tools, options, goes_on=goes_on, literal=literal)
        return [tokens]

    def _checked(self, tokens: array[int]) -> array[int]:
        """Tokens; refuses what is no token, and what is longer than the context."""
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self.vocabulary:
                raise ApiError(400, f"prompt: {token} is no token; allowed: 0 to {self.vocabulary - 1}", param="prompt")
        if self.context is not None and len(tokens) > self.context:
            raise too_long(f"a prompt of {len(tokens)} tokens", self.context)
        return tokens

    def encode(self, text: str, *, special: bool = True) -> array[int]:
        """The tokens of a plain text."""
        return self._tokens(text, special=special)

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]
    ) -> array[int]:
        """The tokens of a conversation up to where its next answer begins."""
        return self.conversation(messages, tools, options)[0]

    def conversation(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        options: dict[str, Any],
        *,
        goes_on: bool = False,
        literal: bool = False,
    ) -> tuple[array[int], bool]:
        """As `encode_chat`, or up to the end of the last message; and whether messages were merged for the template.

        With `literal` special tokens of texts are letters.
        """
        if self.tokenizer.chat_template is None:
            remedy = "put chat_template.jinja beside its tokenizer, or use /v1/completions"
            message = f"{self.name} has no chat template: {remedy}"
            raise ApiError(400, message, code="no_chat_template")
        if taken := sorted(options.keys() & signature(self.tokenizer.apply_chat_template).parameters.keys()):
            # A template of a stranger's own, for one, could compute for hours.
            message = f"chat_template_kwargs: {taken[0]} is not for requests to say"
            raise ApiError(400, message, code="invalid_value", param="chat_template_kwargs")
        self.check_letters(letters_of([messages, tools, options]))
        if literal:
            messages, tools, options = (self._literal.marked(each) for each in (messages, tools, options))
        try:
            text, merged = self.template.text(messages, tools, options, goes_on=goes_on)
        except Exception as error:  # whatever a template raises
            said = f"the model's chat template refuses these messages: {error}"
            raise ApiError(400, said, code="chat_template", param="messages") from error
        return self._tokens(text, special=False, literal=literal), merged

    @cached_property
    def _literal(self) -> LiteralSpecials:
        return LiteralSpecials(self.tokenizer)

    def check_letters(self, letters: int) -> None:
        """Refuse at once what cannot have few enough tokens."""
        if self.context is not None and letters > self.context * self.longest_token:
            raise too_long(f"a prompt of {letters} characters", self.context)

    def _tokens(self, text: str, *, special: bool, literal: bool = False) -> array[int]:
        self.check_letters(len(text))
        if self.context is not None and len(text) > USUAL_LETTERS * self.context + PIECE_LETTERS:
            # A token takes 300 bytes until all are there.
            most, found = MARGIN * self.context, 0
            for begin in range(0, len(text), PIECE_LETTERS):
                found += len(self._encode(text[begin : begin + PIECE_LETTERS], special=False))
                if found > most:
                    raise too_long(f"a prompt of {len(text)} characters", self.context)
        if not literal:
            return self._checked(array("i", self._encode(text, special=special)))
        try:
            return self._checked(array("i", self._literal.tokens(text)))
        except ValueError as error:
            said = f"literal_specials: it cannot be done exactly: {error}"
            raise ApiError(400, said, code="invalid_value", param="literal_specials") from error

    def _encode(self, text: str, *, special: bool) -> list[int]:
        made = self.tokenizer(
            whole_letters(text),
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        tokens: list[int] = made["input_ids"]
        return tokens


def letters_of(value: Any) -> int:
    """Letters of all texts in a value, the names of its fields included."""
    letters, coming = 0, deque([value])
    while coming:
        part = coming.popleft()
        if isinstance(part, str):
            letters += len(part)
        elif isinstance(part, dict):
            letters += sum(map(len, part))
            coming.extend(part.values())
        elif isinstance(part, list | tuple):
            coming.extend(part)
    return letters
