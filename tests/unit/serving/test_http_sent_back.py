"""Answers that clients send back as their libraries give them: OpenAI's own, and litellm as it was recorded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from megakv.serving.http.call import ServedModel
from megakv.serving.http.chat_schemas import ChatBody
from megakv.serving.request import Sampling
from tests.unit.serving.conftest import MOST_S, NAME, Served
from tests.unit.serving.tokenizers import byte_level

RECORDED = json.loads(Path(__file__).with_name("sent_back.json").read_text())
USER = {"role": "user", "content": "hi"}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTION = {"name": "f", "strict": True, "parameters": NOTHING}
REQUIRED: dict[str, Any] = {"model": NAME, "tool_choice": "required", "parallel_tool_calls": False}
KINDS: dict[str, Callable[[Any], Any]] = {
    "object": lambda value: value,
    "model_dump": lambda value: value.model_dump(),
    "to_dict": lambda value: value.to_dict(),
}


@pytest.fixture
def served(bytes_served: Served) -> Served:
    return bytes_served


@pytest.mark.parametrize("body", RECORDED, ids=range(len(RECORDED)))
def test_litellm_goes_on(body: dict[str, Any], served: Served) -> None:
    given = {name: value for name, value in body.items() if name not in ("library", "path")}
    longest = "max_output_tokens" if "input" in given else "max_tokens"
    answer = httpx.post(served.url + body["path"], json={"model": NAME, longest: 2, **given}, timeout=MOST_S)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("kind", KINDS)
def test_chats_go_on(kind: str, served: Served) -> None:
    chat, tools = served.client().chat.completions, [{"type": "function", "function": FUNCTION}]
    with chat.stream(messages=[USER], tools=tools, max_tokens=60, **REQUIRED) as stream:
        streamed = stream.get_final_completion().choices[0].message
    parsed = chat.parse(messages=[USER], tools=tools, max_tokens=60, **REQUIRED).choices[0].message
    said = chat.create(messages=[USER], model=NAME, max_tokens=4).choices[0].message
    messages: list[Any] = [USER]
    for message in (said, parsed, streamed):
        messages.append(KINDS[kind](message))
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "1"} for c in message.tool_calls or []] or [USER]
    assert chat.create(messages=messages, model=NAME, max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize("kind", KINDS)
def test_responses_go_on(kind: str, served: Served) -> None:
    responses, tools = served.client().responses, [{"type": "function", **FUNCTION}]
    said = responses.create(input="hi", model=NAME, max_output_tokens=4).output
    called = responses.create(input="hi", tools=tools, max_output_tokens=60, **REQUIRED).output
    output = {"type": "function_call_output", "call_id": called[0].call_id, "output": "1", "id": None, "odd": 1}
    items = [USER, *map(KINDS[kind], said), {**USER, "phase": None}, *map(KINDS[kind], called), output]
    assert responses.create(input=items, model=NAME, max_output_tokens=2).usage.output_tokens == 2


def test_halves_of_letters_in_calls_come_back(bytes_served: Served) -> None:
    function = {"name": "f", "arguments": '{"a":"\\ud800"}'}
    calls = [{"id": "c", "type": "function", "function": function}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    messages.append({"role": "tool", "tool_call_id": "c", "content": ""})
    body = {"model": NAME, "max_tokens": 2, "messages": messages}
    template = "{% for m in messages %}<user>{{ m.content }}{{ (m.tool_calls or []) | tojson }}{% endfor %}<assistant>"
    reader = ServedModel("m", byte_level(), 4096, 4096, frozenset({0}), Sampling()).reader
    reader.tokenizer.chat_template = template
    (tokens,) = reader.prompts(ChatBody.model_validate_json(json.dumps(body)))
    assert len(tokens)
    assert httpx.post(f"{bytes_served.url}/v1/chat/completions", json=body, timeout=MOST_S).status_code == 200
