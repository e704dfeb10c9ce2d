"""Answers that are JSON of a schema or calls of tools, whichever the model begins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from megakv.serving.http.parts import Part, Parts

LEAST_LETTERS = 3
"""Of what calls begin with: less is no mark."""


@dataclass(frozen=True)
class Opening:
    """What a model's calls begin with, as text and as a grammar has it; nothing where no call would be seen as one."""

    text: str
    lark: str

    @classmethod
    def of(cls, template: Any, tokenizer: PreTrainedTokenizerBase) -> Opening | None:
        """Opening of an answer template's calls; None where it has no text that all calls begin with."""
        fields = template.get("fields") if isinstance(template, dict) else None
        if not (calls := (fields or {}).get("tool_calls")):
            return cls("", "")
        text = calls.get("open") or _literal(calls.get("open_pattern") or "")
        if len(text) < LEAST_LETTERS or text[0] in '{["':
            return None
        added = {str(token): id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        name = max((name for name in added if text.startswith(name)), key=len, default="")
        rest = json.dumps(text[len(name) :]) if len(text) > len(name) else ""
        return cls(text, f"<[{added[name]}]> {rest}".strip() if name else rest)


def _literal(pattern: str) -> str:
    """What a pattern begins with in any case, but for blanks."""
    pattern, found, at = pattern.removeprefix(r"\s*"), "", 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\" and at + 1 < len(pattern) and not pattern[at + 1].isalnum():
            at += 1
            letter = pattern[at]
        elif letter in "*?{+":
            return found[:-1]
        elif letter in "\\.^$[]()|}":
            # Of alternatives none is there in any case.
            return "" if letter == "|" else found
        found, at = found + letter, at + 1
    return found


class EitherParts:
    """All is text, unless it begins as calls do: then it is cut as the model marks its parts."""

    def __init__(self, opening: str, calls: Parts):
        self._opening, self._calls = opening, calls
        self._held, self._plain = "", False

    def add(self, text: str, *, last: bool) -> list[Part]:
        if self._plain:
            return [text] if text else []
        self._held += text
        if self._held.startswith(self._opening):
            self._opening = ""
            held, self._held = self._held, ""
            return self._calls.add(held, last=last)
        if not last and self._opening.startswith(self._held):
            return []
        self._plain = True
        return [self._held] if self._held else []
