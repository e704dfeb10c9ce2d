"""JSON schemas as llguidance takes them: what it cannot hold an answer to is left out, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MOST_LENGTH, MOST_SIZE = 1 << 16, 10_000
"""Of what a schema may count: the library takes them without making something for each. And of a regular expression,
in characters with all repetitions written out: it makes something for each of those."""
COUNTS = frozenset(f"{bound}{what}" for bound in ("min", "max") for what in ("Items", "Length", "Properties"))
LEFT_OUT = frozenset(("uniqueItems", "propertyNames"))
"""An answer may be otherwise than they say."""
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
"""Of texts, that answers are held to; others are names alone, as the standard has it."""
WHOLE = {f"{sign}int{bits}": bits for sign in ("", "u") for bits in (8, 16, 32)}
SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose values are schemas by name; all others that have some have them as they are, or in a list."""
ONES = frozenset(
    ("items", "additionalProperties", "anyOf", "allOf", "oneOf", "prefixItems", "not", "if", "then", "else", "contains")
)
LOOKS = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[bB1-9])")
"""Look-around and what refers back: no automaton has them."""
REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def holdable(schema: Any) -> Any:
    """The schema without what cannot be held; a ValueError names what it counts too far."""
    if isinstance(schema, list):
        return [holdable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in COUNTS and isinstance(value, int | float) and not 0 <= value <= MOST_LENGTH:
            if name.startswith("min") or value < 0:
                raise ValueError(f"{name} = {value}: allowed: 0 to {MOST_LENGTH}")
            # No answer comes to so many.
            continue
        if name == "pattern" and isinstance(value, str):
            check_regex(value)
            if LOOKS.search(value):
                continue
        if name in LEFT_OUT or (name == "format" and value not in FORMATS):
            continue
        if name in SCHEMAS and isinstance(value, dict):
            value = {key: holdable(part) for key, part in value.items()}
        found[name] = holdable(value) if name in ONES else value
    return found | _range(schema)


def _range(schema: dict[str, Any]) -> dict[str, Any]:
    """Of whole numbers of so many bits."""
    given = schema.get("format")
    if not isinstance(given, str) or given not in WHOLE:
        return {}
    bits = WHOLE[given]
    least, most = (0, (1 << bits) - 1) if given.startswith("u") else (-(1 << bits - 1), (1 << bits - 1) - 1)
    low, high = schema.get("minimum"), schema.get("maximum")
    numbers = isinstance(low, int | float | None) and isinstance(high, int | float | None)
    if not numbers:
        return {}
    return {"minimum": least if low is None else max(low, least), "maximum": most if high is None else min(high, most)}


def check_regex(text: str) -> None:
    """Refuse one that is too large when its repetitions are written out: a ValueError."""
    if (size := _size(text)) > MOST_SIZE:
        raise ValueError(f"a regular expression of {size} characters, repetitions written out; allowed: {MOST_SIZE}")


def _size(text: str) -> int:
    """Characters when repetitions are written out, at least about so many."""
    open_groups, sums, last = list[int](), 0, 0
    for kind, most in _parts(text):
        if kind == "(":
            open_groups.append(sums)
            sums = last = 0
        elif kind == ")" and open_groups:
            last, sums = sums, open_groups.pop() + sums
        elif kind == "{":
            sums, last = sums + last * (most - 1), last * most
        else:
            sums, last = sums + 1, 1
    return sums + sum(open_groups)


def _parts(text: str) -> Iterator[tuple[str, int]]:
    """Groups' ends, repetitions with how many they are at most, and all else."""
    at = 0
    while at < len(text):
        letter, most = text[at], 1
        if letter == "\\":
            at += 1
            # A class of Unicode counts as hundreds of ranges, and its name is no repetition.
            if named := re.compile(r"[pPx]\{[^}]*\}").match(text, at):
                at = named.end() - 1
        elif letter == "[":
            end = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL).match(text, at)
            at = end.end() - 1 if end else at
        elif letter == "{" and (repeat := REPEAT.match(text, at)):
            # What is too long a number is too many.
            counts = [min(int(count[:9]), 10**9) for count in repeat.groups() if count]
            most, at = max(1, *counts), repeat.end() - 1
        yield (letter if letter in "()" or most > 1 else "."), most
        at += 1


def check_repeats(grammar: str) -> None:
    """Refuse a grammar whose rules repeat each other too often: a ValueError."""
    product = 1
    for repeat in REPEAT.finditer(grammar):
        product *= max(1, *(min(int(count[:9]), 10**9) for count in repeat.groups() if count))
        if product > MOST_SIZE * 10:
            raise ValueError(f"repetitions that multiply to more than {MOST_SIZE * 10}; allowed: so many in all")
