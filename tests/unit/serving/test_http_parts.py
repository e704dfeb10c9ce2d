"""Tools and reasoning: what templates are given, and how answers are cut into parts, however they come."""

import json
import random
from typing import Any

import pytest
from llguidance.hf import from_tokenizer
from transformers.cli.serving.utils import ReasoningText, ToolCall

from megakv.serving.form import Form
from megakv.serving.http.errors import ApiError
from megakv.serving.http.parts import CallsParts, Part, Parts, free_parts
from megakv.serving.http.schemas import ChatBody
from megakv.serving.http.served_model import ServedModel
from megakv.serving.request import Sampling
from tests.unit.serving.tokenizers import byte_level

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }} {{ tool.function.parameters | tojson }}]{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "!{{ call.function.name }}:{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ANSWERS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<end>", "content": "text"},
    },
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def served() -> ServedModel:
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    return ServedModel("tiny", tokenizer, 4096, len(tokenizer), frozenset({0}), Sampling(), ANSWERS)


def rendered(served: ServedModel, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    body = ChatBody.model_validate_json(json.dumps({"model": "tiny", "messages": messages}))
    values = [message.template_values() for message in body.messages]
    text: str = served.tokenizer.decode(list(served.reader.encode_chat(values, tools, {})))
    return text


def test_templates_are_given_tools_and_calls(served: ServedModel) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "is it"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "warm"},
    ]
    text = rendered(served, messages, [TOOL])
    assert text.startswith('[weather {"type": "object", "properties": {}}]<user>how is it<assistant>!weather:')
    assert "Köln" in text and text.endswith("<tool>warm<assistant>") and "\\" not in text
    with pytest.raises(ApiError, match="system first"):
        rendered(served, [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], None)


def cut(cutter: Parts, text: str) -> list[Part]:
    """An answer that comes in pieces."""
    places = sorted(random.choices(range(len(text) + 1), k=random.randint(0, 12)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return [part for n, piece in enumerate(pieces, 1) for part in cutter.add(piece, last=n == len(pieces))]


def parts(served: ServedModel, text: str) -> list[Part]:
    return cut(free_parts(served, served.reader.encode("<user>a<assistant>"), [TOOL]), text)


def test_answers_are_cut_into_parts(served: ServedModel) -> None:
    text = '<think>let me see</think>I ask.<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    for _ in range(30):
        found = parts(served, text)
        calls = [part for part in found if isinstance(part, ToolCall)]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Köln"})]
        thought = "".join(part for part in found if isinstance(part, ReasoningText))
        said = "".join(part for part in found if isinstance(part, str) and not isinstance(part, ReasoningText))
        assert (thought, said.strip()) == ("let me see", "I ask.")


def test_what_ends_within_a_call_is_no_error(served: ServedModel) -> None:
    for _ in range(10):
        found = parts(served, 'Yes.<tool_call>{"name": "wea')
        assert not any(isinstance(part, ToolCall) for part in found)
        assert "".join(part for part in found if isinstance(part, str)).strip() == "Yes."


@pytest.mark.parametrize("most", [1, 2, 5])
def test_an_array_has_no_more_calls_than_may_be_sent_back(served: ServedModel, most: int) -> None:
    words = from_tokenizer(served.tokenizer)
    form = Form.calls([("f", {"type": "object", "properties": {}})], words, most=most)

    def fits(calls: int) -> bool:
        state, text = form.begin(), "[" + ",".join(calls * ['{"name":"f","parameters":{}}']) + "]"
        for token in served.tokenizer.encode(text, add_special_tokens=False):
            if not state.allowed(words.vocab_size)[token]:
                return False
            state.take(token)
        return True

    assert [fits(calls) for calls in range(1, most + 2)] == [*[True] * most, False]


def test_an_array_is_cut_into_calls() -> None:
    """Whatever its strings have of what it is made of; one that is cut off has all calls before."""
    for _ in range(50):
        odd = ["".join(random.choices('ab\\"{}[],:é\n', k=random.randint(0, 9))) for _ in range(4)]
        calls = [{"name": random.choice(odd), "parameters": {random.choice(odd): [{}, odd[1]]}} for _ in range(3)]
        text = json.dumps(calls, separators=(",", ":"))
        found = [(call.name, json.loads(call.arguments)) for call in cut(CallsParts(), text)]
        assert found == [(call["name"], call["parameters"]) for call in calls]
        last = len(json.dumps(calls[-1], separators=(",", ":")))
        assert len(cut(CallsParts(), text[: -1 - random.randint(1, last)])) == 2
        assert len(cut(CallsParts(), text[:-1])) == 3
