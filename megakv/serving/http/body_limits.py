"""Bounds of a body that hold while it comes in: what is counted has not been parsed yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from megakv.serving.http.errors import ApiError, too_long

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
