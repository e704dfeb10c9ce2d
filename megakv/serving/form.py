"""Answers of a given form, as JSON of a schema: which tokens may come next, by llguidance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

COMPACT: Any = {"whitespace_flexible": False}
"""A model that may write blanks between two values may never stop to."""


@dataclass(frozen=True)
class Form:
    """The grammar of an answer, in the tokens of a model."""

    grammar: str
    tokenizer: LLTokenizer

    @classmethod
    def json(cls, schema: dict[str, Any], tokenizer: LLTokenizer) -> Form:
        """That of a JSON schema; a ValueError says what of the schema cannot be."""
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT)
        if problem := LLMatcher.validate_grammar(grammar, tokenizer):
            raise ValueError(problem.strip().splitlines()[0])
        return cls(grammar, tokenizer)

    def begin(self) -> FormState:
        """An answer begins."""
        return FormState(LLMatcher(self.tokenizer, self.grammar, log_level=0))


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
        return self._matcher.get_error() if self._matcher.is_error() else ""
