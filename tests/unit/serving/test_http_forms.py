"""Answers that are JSON of a schema, by OpenAI's own client, whatever the model would rather say."""

import json
import random
from typing import Any

import httpx
import openai
import pytest

from tests.distributed.models import prose
from tests.unit.serving.conftest import MOST_S, NAME, Served, check_error


@pytest.fixture
def served(bytes_served: Served) -> Served:
    return bytes_served


def ask(served: Served, response_format: Any, **options: Any) -> Any:
    """The model's weights are random: so would its answers be."""
    messages: Any = [{"role": "user", "content": prose(random.randint(1, 20))}]
    values = {"model": NAME, "temperature": random.choice([0, 1]), "max_tokens": 300, **options}
    return served.client().chat.completions.create(messages=messages, response_format=response_format, **values)


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def strict(properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def test_answers_are_of_the_schema(served: Served) -> None:
    words = [prose(1) for _ in range(3)]
    schema = strict(
        {
            "word": {"enum": words},
            "right": {"type": "boolean"},
            "parts": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 1, "maxItems": 3},
            "none": {"type": "null"},
        }
    )
    answer = ask(served, form(schema), n=3)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert list(value) == ["word", "right", "parts", "none"]
        assert value["word"] in words and value["right"] in (True, False) and value["none"] is None
        assert 1 <= len(value["parts"]) <= 3 and {*value["parts"]} <= {1, 22, 333}
    streamed = ask(served, form(schema), stream=True, logprobs=True, top_logprobs=2)
    pieces = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
    assert json.loads("".join(pieces)).keys() == schema["properties"].keys()


def test_answers_of_compressed_caches_are_too(served: Served) -> None:
    schema = strict({"right": {"type": "boolean"}})
    messages: Any = [{"role": "user", "content": prose(80)}]
    before = served.loop.stats().compressed
    answer = served.client().chat.completions.create(
        model=NAME, messages=messages, response_format=form(schema), n=2, extra_body={"compress_cache": True}
    )
    assert all(json.loads(choice.message.content)["right"] in (True, False) for choice in answer.choices)
    assert served.loop.stats().compressed == before + 2


def test_answers_that_repeat_something_are_the_same_with_prompt_lookup(served: Served) -> None:
    """Greedy and drawn ones; candidates that the form does not allow are wrong."""
    schema = strict({"text": {"const": f"{prose(6)} {'of the same ' * 12}"}, "right": {"type": "boolean"}})
    messages: Any = [{"role": "user", "content": prose(5)}]
    for temperature in (0, 1):
        before = served.loop.stats().accepted_tokens
        options: Any = {"temperature": temperature, "seed": 5, "max_tokens": 400, "response_format": form(schema)}
        plain, looked = (
            served.client().chat.completions.create(model=NAME, messages=messages, extra_body=extra, **options)
            for extra in ({"prompt_lookup": 0}, {})
        )
        assert plain.choices[0].message.content == looked.choices[0].message.content
        assert plain.usage.completion_tokens == looked.usage.completion_tokens
        assert served.loop.stats().accepted_tokens > before


def test_any_object(served: Served) -> None:
    """It may be longer than there are tokens for: what there is begins one."""
    choice = ask(served, {"type": "json_object"}, max_tokens=40).choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_responses(served: Served) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "yes", "schema": strict({"yes": {"enum": ["y", "n"]}})}}
    create = served.client().responses.create
    first = create(model=NAME, input=prose(4), text=text, max_output_tokens=50)
    assert json.loads(first.output_text)["yes"] in ("y", "n")
    second = create(model=NAME, input=prose(4), text=text, max_output_tokens=50, previous_response_id=first.id)
    assert json.loads(second.output_text)["yes"] in ("y", "n")
    assert create(model=NAME, input=prose(4), text={"format": {"type": "text"}}, max_output_tokens=2).output_text


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": form({"type": "thing"})}, "response_format"),
        ({"response_format": form({"type": "string", "pattern": "(["})}, "response_format"),
        ({"response_format": form({"$ref": "http://127.0.0.1:1/other.json"})}, "response_format"),
        ({"response_format": form({"type": "object", "minProperties": 3, "maxProperties": 1})}, "response_format"),
        (
            {"response_format": form({"type": "array", "items": {"type": "integer"}, "minItems": 2_000_000_000})},
            "minItems",
        ),
        ({"response_format": form({"$defs": {"a": {"minLength": 1e9}}, "type": "object"})}, "minLength"),
        ({"response_format": form({"type": "object", "description": "x" * 70_000})}, "70"),
        ({"response_format": form({"enum": list(range(10_001))})}, "parts"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_is_said(served: Served, body: dict[str, Any], says: str) -> None:
    asked = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, **body}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=MOST_S)
    assert says in check_error(answer, 400)["message"]


def test_a_deep_schema(served: Served) -> None:
    """A schema of many levels, which is read by a thread of its own."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep, "b": {"type": "integer"}}, "required": ["a"]}
    try:
        choice = ask(served, form(deep), max_tokens=30).choices[0]
        assert choice.message.content.startswith('{"a":{"a":')
    except openai.BadRequestError as error:
        assert "response_format" in str(error)
