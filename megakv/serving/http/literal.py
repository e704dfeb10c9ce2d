"""Special tokens in the texts of a request, taken as the letters that they are written with."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from copy import deepcopy
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

BEGIN, END = "\ue100", "\ue101"
"""Private letters, between which a special token's number stands while a template writes the conversation."""
MARKED = re.compile(f"{BEGIN}([0-9]+){END}")


class LiteralSpecials:
    """Marks special tokens in texts, and makes tokens of what a template has written around them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._names = [token.content for _, token in added if token.special and token.content]
        self._ids = {token.content: number for number, token in added if token.special and token.content}
        self._numbered = frozenset(self._ids.values())
        longest = sorted(self._names, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        self._numbers = {name: n for n, name in enumerate(self._names)}

    def marked(self, value: Any) -> Any:
        """A value in whose texts special tokens are marked; marks that are there already are left out."""
        if isinstance(value, str):
            text = value.replace(BEGIN, "").replace(END, "")
            return self._special.sub(lambda found: f"{BEGIN}{self._numbers[found[0]]}{END}", text)
        if isinstance(value, dict):
            return {self.marked(name): self._marked(name, each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(each) for each in value]
        return value

    def _marked(self, name: Any, value: Any) -> Any:
        """A field's value; in arguments, which are JSON in a text, escapes stand for letters of special tokens too."""
        if name == "arguments" and isinstance(value, str):
            with suppress(ValueError, RecursionError):
                return json.dumps(self.marked(json.loads(value)), ensure_ascii=False)
        return self.marked(value)

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text with marks; a ValueError where they cannot be those of the text without its special tokens.

        A tokenizer splits a text at special tokens before all else. So what the template has written of them stands
        alone, and what is between has the tokens of a text that has none. Whether this tokenizer does is looked at.
        """
        neutral = MARKED.sub("x", text)
        if BEGIN in neutral or END in neutral:
            raise ValueError("the chat template takes special tokens of texts apart")
        whole: list[int] = self._tokenizer(neutral, add_special_tokens=False, verbose=False)["input_ids"]
        if self._split(neutral) != whole:
            raise ValueError("this tokenizer's special tokens change the text beside them")
        return self._split(text)

    def _split(self, text: str) -> list[int]:
        found, begin = list[int](), 0
        for special in self._special.finditer(text):
            found += self._between(text[begin : special.start()])
            found.append(self._ids[special[0]])
            begin = special.end()
        return found + self._between(text[begin:])

    def _between(self, text: str) -> list[int]:
        if not text:
            return []
        literal = MARKED.sub(lambda found: self._names[int(found[1])], text)
        how: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        tokens: list[int] = self._splitting(literal, **how)["input_ids"]
        if not self._numbered.isdisjoint(tokens):
            raise ValueError("this tokenizer makes special tokens of letters")
        return tokens

    @cached_property
    def _splitting(self) -> PreTrainedTokenizerBase:
        """A tokenizer of its own: whether it splits is a setting, which other threads would see."""
        tokenizer = deepcopy(self._tokenizer)
        tokenizer("a", split_special_tokens=True)
        return tokenizer
