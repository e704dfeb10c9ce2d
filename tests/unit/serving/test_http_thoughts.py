"""A form holds when thoughts have ended that a chat template has begun."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from llguidance.hf import from_tokenizer
from transformers.cli.serving.utils import ReasoningText, ToolCall

from megakv.serving.form import Form
from megakv.serving.http.answer_forms import HERMES
from megakv.serving.http.parts import CallsParts, NamedCallParts, Parts, PlainParts, thoughts_end
from megakv.serving.http.settings import HttpSettings
from megakv.serving.http.thoughts import ThoughtParts, form_behind
from tests.unit.serving.conftest import MOST_S, NAME, Served, running
from tests.unit.serving.tokenizers import byte_level, random_text

SCHEMA = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("calls", [False, True])
def test_a_form_begins_behind_thoughts(special: bool, calls: bool) -> None:
    tokenizer = byte_level()
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    words = from_tokenizer(tokenizer)
    form = Form.calls([("f", SCHEMA)], words, most=1) if calls else Form.json(SCHEMA, words)
    behind = form_behind(form, "</think>", tokenizer, words)
    answer = '[{"name":"f","parameters":{"a":5}}]' if calls else '{"a":5}'

    def fits(*pieces: str) -> bool:
        state = behind.begin()
        for token in [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]:
            if not state.allowed(words.vocab_size)[token]:
                return False
            state.take(token)
        return bool(state.allowed(words.vocab_size)[tokenizer.eos_token_id])

    for _ in range(5):
        thought = random_text(20).replace("<", "")
        for blanks in ("", "\n", "\n\n"):
            assert fits(thought, "</think>", blanks, answer)
        assert not fits(thought, answer) and not fits(thought, "</think>", "no")
        assert not fits("</think>", "\n\n\n", answer)


def cut(parts: Parts, text: str) -> list[Any]:
    places = sorted(random.choices(range(len(text) + 1), k=random.randint(0, 9)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return [part for n, piece in enumerate(pieces, 1) for part in parts.add(piece, last=n == len(pieces))]


def test_thoughts_are_reasoning_and_the_rest_is_of_the_form() -> None:
    for _ in range(50):
        thought, blanks = (
            random_text(12).replace("<", "") + random.choice(["", "</", "<thi"]),
            random.choice(["", "\n\n"]),
        )
        found = cut(ThoughtParts("</think>", PlainParts), f'{thought}</think>{blanks}{{"a":"</think>"}}')
        assert "".join(part for part in found if isinstance(part, ReasoningText)) == thought
        assert "".join(part for part in found if not isinstance(part, ReasoningText)) == '{"a":"</think>"}'
        found = cut(ThoughtParts("</think>", CallsParts), f'{thought}</think>[{{"name":"f","parameters":{{}}}}]')
        assert [part for part in found if isinstance(part, ToolCall)] == [ToolCall("f", "{}")]
        # Cut off within them; whoever named a function has its call nevertheless.
        found = cut(ThoughtParts("</think>", lambda: NamedCallParts("f")), thought)
        assert "".join(part for part in found if isinstance(part, ReasoningText)) == thought
        assert [part for part in found if isinstance(part, ToolCall)] == [ToolCall("f", "")]


def test_only_thoughts_that_are_open_have_an_end() -> None:
    begin = "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n"
    assert thoughts_end(HERMES, f"{begin}<think>\n") == "</think>"
    for prompt in (begin, f"{begin}<think>\n\n</think>\n\n"):
        assert thoughts_end(HERMES, prompt) is None
    assert thoughts_end(None, f"{begin}<think>\n") is None


@pytest.fixture(scope="module")
def thinking(bytes_served: Served) -> Iterator[Served]:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    begin = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n"
    tokenizer.chat_template = begin + "{% if think is not false %}<think>{% endif %}"
    model = replace(bytes_served.model, tokenizer=tokenizer, answer_template=HERMES)
    with running((bytes_served.loop, model), HttpSettings(NAME, port=0)) as url:
        yield replace(bytes_served, model=model, url=url)


def test_answers_are_json_behind_thoughts(thinking: Served) -> None:
    """Of a model that has not learned anything, which a bias makes end its thoughts."""
    end = thinking.model.tokenizer.convert_tokens_to_ids("</think>")

    def ask(**more: Any) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": NAME,
            "messages": [{"role": "user", "content": "ab"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            "max_tokens": 30,
            **more,
        }
        answer = httpx.post(f"{thinking.url}/v1/chat/completions", json=body, timeout=MOST_S).json()
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    for more in ({"chat_template_kwargs": {"think": False}}, {"logit_bias": {str(end): 100}}):
        answer = ask(**more)
        assert json.loads(answer["message"]["content"]) == {"a": 5} and answer["finish_reason"] == "stop"
        assert "reasoning_content" not in answer["message"]
    # Its thoughts have the length that there is.
    answer = ask(logit_bias={str(end): -100})
    assert answer["message"]["reasoning_content"] and answer["message"]["content"] == ""
    assert answer["finish_reason"] == "length"


def test_line_ends_within_the_answer_stay() -> None:
    for _ in range(50):
        answer = "a" + "".join(random.choices("\n\nab ", k=30)) + "b"
        text = random_text(9).replace("<", "") + "</think>" + random.choice(["", "\n", "\n\n"]) + answer
        parts = cut(ThoughtParts("</think>", PlainParts), text)
        assert "".join(part for part in parts if not isinstance(part, ReasoningText)) == answer
