"""Draws bodies of given sizes: arrays, keys, depth, strings, numbers, right and wrong, in every field."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.distributed.serving import NAME

MEBIBYTE = 1 << 20
ENDPOINTS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "aa ab"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "aa ab", "max_tokens": 2},
    "/v1/responses": {"input": "aa ab", "max_output_tokens": 2},
}
FIELDS = {
    "/v1/chat/completions": [
        *("messages", "tools", "tool_choice", "response_format", "chat_template_kwargs", "generation_config"),
        *("reasoning_effort", "verbosity"),
    ],
    "/v1/completions": ["prompt", "suffix", "echo", "logprobs"],
    "/v1/responses": ["input", "instructions", "tools", "tool_choice", "text", "previous_response_id", "reasoning"],
}
SHARED = [
    "model",
    "temperature",
    "logit_bias",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "others",
]


def repeated(unit: str, begin: str = "[", end: str = "]", join: str = ",") -> Callable[[int], str]:
    """A value that is one unit, again and again."""
    return lambda size: begin + join.join([unit] * max(1, size // (len(unit.encode()) + len(join)))) + end


def keys(size: int) -> str:
    return "{" + ",".join(f'"{number:x}":1' for number in range(size // 10)) + "}"


VALUES: dict[str, Callable[[int], str]] = {
    "flags": repeated("true"),
    "digits": repeated("1"),
    "numbers": lambda size: "[" + ",".join(str(random.randrange(10**6)) for _ in range(size // 7)) + "]",
    "fractions": repeated("1.5e-3"),
    "nothings": repeated("null"),
    "objects": repeated("{}"),
    "arrays": repeated("[]"),
    "arrays of tokens": repeated("[1,2,3]"),
    "words": repeated('"ab"'),
    "objects of one key": repeated('{"a":1}'),
    "messages": repeated('{"role":"user","content":"aa"}'),
    "parts": repeated('{"type":"text","text":"aa"}', '[{"role":"user","content":[', "]}]"),
    "tool": repeated("ab", '[{"type":"function","function":{"name":"a","description":"', '"}}]', " "),
    "parameters": lambda size: '[{"type":"function","function":{"name":"a","parameters":' + keys(size) + "}}]",
    "calls": repeated(
        "ab",
        '[{"role":"assistant","content":"","tool_calls":[{"function":{"name":"a","arguments":"',
        '"}}]},{"role":"user","content":"a"}]',
        " ",
    ),
    "reasoning": repeated("ab", '[{"role":"assistant","content":"a","reasoning_content":"', '"}]', " "),
    "text": repeated("ab", '"', '"', " "),
    "wide text": repeated("aéa漢😀", '"', '"', " "),
    "escapes": repeated("\\u00e9", '"', '"', ""),
    "backslashes": repeated("\\\\", '"', '"', ""),
    "quotes": repeated('\\"', '"', '"', ""),
    "keys": keys,
    "one key": repeated('"a":1', "{", "}"),
    "deep arrays": lambda size: "[" * (size // 2) + "]" * (size // 2),
    "deep objects": lambda size: '{"a":' * (size // 6) + "1" + "}" * (size // 6),
    "digits of one number": lambda size: "1" * size,
    "digits of a fraction": lambda size: "0." + "1" * size,
    "blanks": lambda size: " " * size + "1",
}


@dataclass(frozen=True)
class LargeBody:
    """A request."""

    name: str
    path: str
    content: bytes


def draw_body(size: int) -> LargeBody:
    """A body of about so many bytes: one field is large, or the names of fields are many; some are cut off."""
    path = random.choice(sorted(ENDPOINTS))
    kind, field = random.choice(sorted(VALUES)), random.choice([*FIELDS[path], *SHARED])
    others = {"model": NAME, **ENDPOINTS[path]}
    others.pop(field, None)
    text = json.dumps(others)[:-1] + f',"{field}":{VALUES[kind](size)}' + "}"
    if kind == "keys" and random.random() < 0.5:
        field, text = "its own", json.dumps(others)[:-1] + "," + keys(size)[1:]
    content, cut = text.encode(), random.random() < 0.1
    return LargeBody(
        f"{kind} in {field} of {path}" + " (cut off)" * cut, path, content[: len(content) // 2] if cut else content
    )
