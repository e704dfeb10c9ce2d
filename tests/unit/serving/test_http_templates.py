"""Conversations of before reach templates as they were, in what each of them takes."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from megakv.serving.http.call import ServedModel
from megakv.serving.http.chat_schemas import ChatBody
from megakv.serving.http.errors import ApiError
from megakv.serving.http.settings import HttpSettings
from megakv.serving.request import Sampling
from tests.distributed.models import prose
from tests.unit.serving.conftest import MOST_S, NAME, Served, running
from tests.unit.serving.tokenizers import byte_level

USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "42"}
ASKS_FOR_NONE = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for t in m.tool_calls %}"
    "{{ '[' + t['function']['name'] + t['function']['arguments'] + ']' }}{% endfor %}"
    "{% else %}{{ m.role + m.content }}{% endif %}{% endfor %}"
)
TEXT_ALONE = (
    "{% for m in messages %}{% if m.tool_calls %}[{{ m.tool_calls[0].function.arguments }}]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
BY_NAME = (
    "{% for m in messages %}{% if m.tool_calls %}{% for k, v in m.tool_calls[0].function.arguments|items %}"
    "{{ k }}={{ v }};{% endfor %}{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"
MIXED = (
    "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% else %}{{ m.content.strip() }}{% endif %}|{% endfor %}"
)
ALTERNATES = (
    "{% if messages[0].role == 'system' %}{{ '<s>' + messages[0].content }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if m.role != 'tool' and not m.tool_calls and (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
)


def model(template: str) -> ServedModel:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return ServedModel(NAME, tokenizer, 8192, len(tokenizer), frozenset({0}), Sampling())


def call(arguments: Any, content: str | None = None) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }


def written(template: str, messages: list[dict[str, Any]], **more: Any) -> tuple[str, bool]:
    served = model(template)
    body = ChatBody.model_validate_json(json.dumps({"model": NAME, "messages": messages, **more}))
    (tokens,) = served.reader.prompts(body)
    text: str = served.tokenizer.decode(list(tokens))
    return text, body.merged


def test_a_template_that_asks_for_no_content_is_told_of_none() -> None:
    arguments = json.dumps({prose(1): prose(3)}, indent=random.choice([None, 3]))
    assert written(ASKS_FOR_NONE, [USER, call(arguments), RESULT]) == (f"userhi[f{arguments}]tool42", False)
    assert written(BY_NAME, [USER, call('{"a": 1}'), RESULT])[0] == "hia=1;42"
    # Where there is no call, nothing is a text of no letters.
    assert written(ASKS_FOR_NONE, [USER, {"role": "assistant", "content": None}, USER])[0] == "userhiassistantuserhi"


@pytest.mark.parametrize("given", ["", " ", None, "null", "{}"])
def test_no_arguments_are_an_empty_object(given: str | None) -> None:
    assert written(BY_NAME, [USER, call(given), RESULT])[0] == "hi42"
    assert written(TEXT_ALONE, [USER, call(given), RESULT])[0] == "hi[{}]42"


def test_arguments_are_as_templates_take_them() -> None:
    for _ in range(5):
        arguments = {prose(1).replace(" ", ""): random.choice([1, "ä", None, [2]])}
        text = json.dumps(arguments, indent=random.choice([None, 2]), ensure_ascii=random.choice([True, False]))
        ((name, value),) = arguments.items()
        assert written(BY_NAME, [USER, call(text), RESULT])[0] == f"hi{name}={value};42"
        assert written(TEXT_ALONE, [USER, call(text), RESULT])[0] == f"hi[{text}]42"


@pytest.mark.parametrize("given", ['{"a": ', '"x"', "[1]", "5", "[" * 5000])
def test_arguments_that_are_no_object_are_said_nevertheless(given: str) -> None:
    text, _ = written(BY_NAME, [USER, call(given), RESULT])
    assert text.startswith("hiarguments=") and given.strip('"') in text


def test_content_comes_as_parts_where_texts_are_not_read() -> None:
    content = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    assert written(PARTS, messages)[0] == "s|AB|"
    assert written(MIXED, [*messages, {"role": "assistant", "content": "yes"}])[0] == "s|AB|yes|"


def test_roles_are_merged_where_templates_want_them_to_alternate() -> None:
    yes = {"role": "assistant", "content": "yes"}
    late = {"role": random.choice(["system", "developer"]), "content": "s"}
    for template, messages, expected in [
        (ALTERNATES, [USER, yes, USER], "<user>hi<assistant>yes<user>hi"),
        (ALTERNATES, [USER, USER], "<user>hi\n\nhi"),
        (ALTERNATES, [USER, yes, yes, USER], "<user>hi<assistant>yes\n\nyes<user>hi"),
        (ALTERNATES, [USER, yes, late, USER], "<s>s<user>hi<assistant>yes<user>hi"),
        (ALTERNATES, [late, late, USER], "<s>s\n\ns<user>hi"),
        (NO_SYSTEM, [late, USER, yes, late, USER], "<user>s\n\ns\n\nhi<assistant>yes<user>hi"),
    ]:
        assert written(template, messages) == (expected, messages != [USER, yes, USER])
    with pytest.raises(ApiError, match="roles must alternate"):
        written(ALTERNATES, [yes, USER])


def test_templates_that_drop_results_are_known() -> None:
    drops = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    assert model(drops).reader.template.traits.drops_results
    only_with_tools = "{% for m in messages if tools or m.role != 'tool' %}{{ m.content }}{% endfor %}"
    for template in (ASKS_FOR_NONE, BY_NAME, PARTS, MIXED, only_with_tools):
        assert not model(template).reader.template.traits.drops_results


TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_the_last_message_goes_on() -> None:
    said = {"role": "assistant", "content": f"{prose(3)}."}
    more = {"continue_final_message": True}
    for flags in (more, {**more, "add_generation_prompt": False}):
        assert written(TURNS, [USER, said], **flags)[0] == f"<user>hi<end><assistant>{said['content']}"
    assert written(TURNS, [USER, said], add_generation_prompt=True)[0].endswith("<end><assistant>")
    for messages, flags in [
        ([USER], more),
        ([USER, call("{}")], more),
        ([USER, said], {**more, "add_generation_prompt": True}),
        ([USER, said], {"add_generation_prompt": False}),
    ]:
        with pytest.raises(ValueError, match="continue_final_message"):
            written(TURNS, messages, **flags)


@pytest.fixture(scope="module")
def alternating(served: Served) -> Iterator[Served]:
    tokenizer = served.model.tokenizer.__class__.from_pretrained(served.model.tokenizer.name_or_path)
    tokenizer.chat_template = ALTERNATES.replace("'<' + m.role + '>' + ", "' ' + ").replace("'<s>' + ", "")
    changed = replace(served.model, tokenizer=tokenizer)
    with running((served.loop, changed), HttpSettings(NAME, port=0)) as url:
        yield replace(served, model=changed, url=url)


def ask(served: Served, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    body = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **more}
    return httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=MOST_S)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_that_messages_were_merged(stream: bool, alternating: Served) -> None:
    user = {"role": "user", "content": prose(4)}
    assert "x-megakv-messages" not in ask(alternating, [user], stream=stream).headers
    answer = ask(alternating, [user, user], stream=stream)
    assert (answer.status_code, answer.headers["x-megakv-messages"]) == (200, "merged")


def test_an_answer_goes_on_where_it_was_cut(served: Served) -> None:
    """With the space between, so that both together are what one answer would have been."""
    user = {"role": "user", "content": prose(20)}
    whole = ask(served, [user], max_tokens=12).json()["choices"][0]["message"]["content"]
    begun = ask(served, [user], max_tokens=5).json()["choices"][0]["message"]["content"]
    messages = [user, {"role": "assistant", "content": begun}]
    rest = ask(served, messages, max_tokens=7, continue_final_message=True).json()["choices"][0]["message"]["content"]
    assert begun + rest == whole
