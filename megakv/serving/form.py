"""Answers of a given form, JSON of a schema, calls or any grammar: which tokens may come next, by llguidance."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from torch import Tensor

from megakv.serving.schema import LOOKS, check_regex, check_repeats, holdable

COMPACT: Any = {"whitespace_flexible": False, "coerce_one_of": True}
"""A model that may write blanks between two values may never stop to. Of several kinds it is held to any one."""
MOST_BYTES, MOST_PARTS = 1 << 16, 10_000
"""Of a schema or grammar, and of a schema's parts at all depths: the library makes something for each."""
GUIDANCE = "x-guidance"
"""With it a schema would say how the library is to read it."""
CALL_NAME, CALL_ARGUMENTS, CALL_END = '{"name":', ',"parameters":', "}"
"""What a call's two values stand between."""
MOST_RULES = 1000
"""Of a grammar, counted by colons."""
STEP_FUEL, STEP_ITEMS, SYMBOLS = 50_000, 10_000, 50_000
"""What a token may cost, and how large a grammar may be: a few milliseconds, in the thread that serves everyone."""


@dataclass(frozen=True)
class Form:
    """The grammar of an answer, in the tokens of a model."""

    grammar: str
    """As the library has it."""
    matcher: LLMatcher
    """At the beginning of an answer."""

    @classmethod
    def json(cls, schema: dict[str, Any], tokenizer: LLTokenizer) -> Form:
        """That of a JSON schema; a ValueError says what of the schema cannot be."""
        text = json.dumps({name: value for name, value in schema.items() if name != GUIDANCE})
        check_size(text, "the schema has")
        check_parts(schema)
        text = json.dumps(holdable({name: value for name, value in schema.items() if name != GUIDANCE}))
        return cls.of(LLMatcher.grammar_from_json_schema(text, overrides=COMPACT), tokenizer)

    @classmethod
    def regex(cls, text: str, tokenizer: LLTokenizer) -> Form:
        """Form of a regular expression, which the whole answer is; a ValueError says what of it cannot be."""
        check_size(text, "it has")
        check_regex(text)
        if found := LOOKS.search(text):
            raise ValueError(f"it has {found[0]!r}: look-around and back references are not held to; write it without")
        return cls.of(LLMatcher.grammar_from_regex(text), tokenizer)

    @classmethod
    def lark(cls, text: str, tokenizer: LLTokenizer) -> Form:
        """Form of a grammar in Lark's notation, or in EBNF as llama.cpp and vLLM take it; a ValueError as above."""
        check_size(text, "it has")
        check_repeats(text)
        if "%ignore" in text:
            # Some such grammars make the library write the same blank for ever.
            raise ValueError("%ignore is not held; write what may stand between into the rules")
        if (rules := text.count(":")) > MOST_RULES:
            # It goes down a chain of rules by calls of its own.
            raise ValueError(f"it has up to {rules} rules; allowed: {MOST_RULES}")
        try:
            text = any_to_lark(text)
        except Exception as error:  # whatever a stranger's grammar makes the library raise
            raise ValueError(f"it cannot be read as EBNF: {str(error)[:200]}") from error
        return cls.of(LLMatcher.grammar_from_lark(text), tokenizer)

    @classmethod
    def choice(cls, texts: Sequence[str], tokenizer: LLTokenizer) -> Form:
        """One of some texts."""
        text = "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in texts)
        check_size(text, "they have")
        return cls.of(LLMatcher.grammar_from_lark(text), tokenizer)

    @classmethod
    def json_or(cls, opening: str, schema: dict[str, Any], tokenizer: LLTokenizer) -> Form:
        """JSON of a schema, or what begins with an `opening`, in Lark's notation, and goes on anyhow."""
        # By itself what is wrong with it is said.
        cls.json(schema, tokenizer)
        held = json.dumps({**holdable(schema), GUIDANCE: COMPACT})
        rules = ["start: json | other", f"json: %json {held}", f"other: {opening} (TEXT | <[*]>)*", r"TEXT: /(.|\n)+/"]
        return cls.of(LLMatcher.grammar_from_lark("\n".join(rules)), tokenizer)

    @classmethod
    def arguments(cls, name: str, schema: dict[str, Any], tokenizer: LLTokenizer) -> Form:
        """That of the arguments of one function, which are an object."""
        try:
            if schema["type"] != "object":
                raise ValueError(f"type = {schema['type']!r}: allowed: 'object'")
            return cls.json(schema, tokenizer)
        except ValueError as error:
            raise ValueError(f"parameters of {name!r}: {error}") from error

    @classmethod
    def calls(cls, functions: Sequence[tuple[str, dict[str, Any]]], tokenizer: LLTokenizer, *, most: int) -> Form:
        """That of a JSON array of calls, at `most` so many: each of a function by name, with parameters of its schema.

        Every schema stays a document of its own, in which its references hold.
        """
        check_size("".join(map(json.dumps, functions)), "the schemas of all functions together have")
        for name, schema in functions:
            # By itself what is wrong with one has the function's name.
            cls.arguments(name, schema, tokenizer)
        rules = [f'start: "[" call ("," call){{0,{most - 1}}} "]"' if most > 1 else 'start: "[" call "]"']
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
        for number, (name, schema) in enumerate(functions):
            head = json.dumps(f"{CALL_NAME}{json.dumps(name)}{CALL_ARGUMENTS}")
            parameters = json.dumps({**holdable(schema), GUIDANCE: COMPACT})
            rules.append(f"call_{number}: {head} %json {parameters} {json.dumps(CALL_END)}")
        return cls.of(LLMatcher.grammar_from_lark("\n".join(rules)), tokenizer)

    @classmethod
    def of(cls, grammar: str, tokenizer: LLTokenizer) -> Form:
        """Form of a grammar; a ValueError says what of it cannot be."""
        limits = LLParserLimits(step_lexer_fuel=STEP_FUEL, step_max_items=STEP_ITEMS, max_grammar_size=SYMBOLS)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error().strip().splitlines()[0])
        return cls(grammar, matcher)

    def begin(self) -> FormState:
        """An answer begins."""
        return FormState(self.matcher.deep_copy())


class FormState:
    """How far an answer is."""

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher

    def allowed(self, vocabulary: int) -> Tensor:
        """``[V]`` whether a token may come next; none where the library has given up."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = torch.zeros(vocabulary, dtype=torch.bool)
        known = min(vocabulary, len(bits))
        allowed[:known] = torch.from_numpy(bits[:known]).bool()
        return allowed if not self._matcher.is_error() else torch.zeros_like(allowed)

    def take(self, token: int) -> None:
        """It has come."""
        self._matcher.consume_token(token)

    @property
    def problem(self) -> str:
        """Why nothing more can come; empty where it can."""
        return self._matcher.get_error().strip().splitlines()[0] if self._matcher.is_error() else ""


def check_size(text: str, whose: str) -> None:
    """Refuse schemas that are too long: a ValueError."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"{whose} {len(text)} bytes; allowed: {MOST_BYTES}")


def check_parts(schema: Any) -> None:
    """Refuse what has too many parts, at any depth: a ValueError."""
    parts, coming = 0, deque([schema])
    while coming:
        part = coming.popleft()
        parts += 1
        if parts > MOST_PARTS:
            raise ValueError(f"the schema has more than {MOST_PARTS} parts")
        if isinstance(part, dict):
            coming.extend(part.values())
        elif isinstance(part, list):
            coming.extend(part)
