"""Whatever a model writes is text or a call, for every answer template that transformers has."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS, ReasoningText, ToolCall

from megakv.serving.http.parts import Part, TemplateParts

TEMPLATES = {names[0]: template for names, template in _RESPONSE_TEMPLATE_FALLBACKS.items()}
PROPERTIES = {name: {"type": kind} for name, kind in zip("abcd", ("integer", "string", "object", "array"), strict=True)}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}]
OBJECTS = [
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "f"}',
    '{"name": "f", "parameters": {"a": 1}}',
    '{"name": "f", "arguments": "no"}',
    '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    '{"name": "f", "arguments": {"re": "\\d+"}}',
    '{"name": "f", "arguments": {"a": Infinity}}',
    '{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}',
    '[{"name": "f", "arguments": {}}]',
    '["f"]',
    "null",
    "",
]
INNER = ["<function=f>", "<parameter=a>", "1", "\n", "x", "</parameter>", "<parameter=c>", "{", "}", "</function>"]
GEMMA = ["call:f", "{", "a", ":", '<|"|>', "b", ",", "}", "[", "]", "\x01", "\ud83d", "é"]
MARKS: dict[str, list[str]] = {
    "qwen2": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"],
    "qwen3_5": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"],
    "gemma4": ["<|channel>thought\n", "<channel|>", "<|tool_call>call:f", "<tool_call|>", "<turn|>", "<eos>"],
}
CALLS: dict[str, Callable[[], str]] = {
    "qwen2": lambda: f"<tool_call>\n{random.choice(OBJECTS)}\n</tool_call>",
    "qwen3_5": lambda: f"<tool_call>\n<function=f>{''.join(random.choices(INNER, k=5))}</function>\n</tool_call>",
    "gemma4": lambda: f"<|tool_call>call:f{{{''.join(random.choices(GEMMA, k=5))}}}<tool_call|>",
}


def test_all_templates_are_here() -> None:
    assert TEMPLATES.keys() == MARKS.keys() == CALLS.keys()


def drawn(family: str) -> str:
    """Words, marks and calls; and often something of them is missing, twice there, or cut off."""
    words = ["Yes", " no", "\n", "ä", '"', "\\", "<", *MARKS[family], *INNER, *GEMMA]
    text = "".join(CALLS[family]() if random.random() < 0.4 else random.choice(words) for _ in range(8))
    for _ in range(random.choice([0, 0, 1, 3])):
        a, b = sorted(random.choices(range(len(text) + 1), k=2))
        text = random.choice([text[:a] + text[min(b, a + 3) :], text[:b] + text[a:], text[:b]])
    return text


def cut(template: Any, prefix: str, text: str) -> list[Part]:
    cutter = TemplateParts(template, prefix, TOOLS)
    places = sorted(random.choices(range(len(text) + 1), k=random.randint(0, 20)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return [part for n, piece in enumerate(pieces, 1) for part in cutter.add(piece, last=n == len(pieces))]


def without(marks: re.Pattern[str], text: str) -> str:
    """A text without marks, those too that are there when others are gone."""
    while (less := marks.sub("", text)) != text:
        text = less
    return text


def seen(parts: list[Part]) -> list[tuple[str, str]]:
    """Parts with neighbours of a kind as one."""
    found: list[tuple[str, str]] = []
    for part in parts:
        kind = "call" if isinstance(part, ToolCall) else "thought" if isinstance(part, ReasoningText) else "text"
        text = f"{part.name} {part.arguments}" if isinstance(part, ToolCall) else str(part)
        if found and kind != "call" and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return found


@pytest.mark.parametrize("family", TEMPLATES)
def test_drawn_answers_are_text_and_calls(family: str) -> None:
    marks = re.compile("|".join(map(re.escape, MARKS[family])))
    for _ in range(300):
        text, prefix = drawn(family), random.choice(["", "<|im_start|>assistant\n", "<|turn>model\n"])
        parts = cut(TEMPLATES[family], prefix, text)
        for part in parts:
            if isinstance(part, ToolCall):
                assert part.name and isinstance(json.loads(part.arguments), dict), text
                assert (
                    not re.search("NaN|Infinity", part.arguments) or "Infinity" in json.loads(part.arguments).values()
                )
        # In whatever pieces it comes.
        assert seen(parts) == seen(cut(TEMPLATES[family], prefix, text)), text
        said = "".join(str(part) for part in parts if isinstance(part, str))
        if not any(isinstance(part, ToolCall) for part in parts):
            # All letters are there: marks alone may be gone.
            kept, letters = (re.sub(r"\s", "", without(marks, each)) for each in (said, text))
            assert kept == letters, text
