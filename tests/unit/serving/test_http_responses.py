"""What ``/v1/responses`` takes beside text and functions, and what it says of it, by OpenAI's own client."""

import random
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from megakv.serving.http.response_items import messages_of
from megakv.serving.http.response_schemas import ResponseBody
from tests.distributed.models import POSITIONS, prose
from tests.unit.serving.conftest import MOST_S, NAME, Served, check_error

CUSTOM: Any = {"type": "custom", "name": "shell", "description": "Runs a text."}
BUILT_IN = ["web_search", "file_search", "code_interpreter", "local_shell", "mcp", "image_generation"]


def create(served: Served, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": NAME, "input": prose(5), "max_output_tokens": 8, "temperature": 0}
    return served.client().responses.create(**{**asked, **more})


def test_items_are_messages_of_a_chat() -> None:
    call = {"type": "function_call", "id": "fc", "call_id": "c1", "name": "f", "arguments": '{"a": 1}', "status": "x"}
    custom = {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": 'ls "x"'}
    said = {"type": "output_text", "text": "so", "annotations": [], "logprobs": []}
    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}], "encrypted_content": None}
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        thought,
        {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": [said]},
        call,
        custom,
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        summed,
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
    ]
    found = messages_of(ResponseBody.model_validate({"model": NAME, "input": items}))
    roles = ["user", "assistant", "tool", "tool", "assistant", "assistant"]
    assert [message["role"] for message in found] == roles
    answer = found[1]
    assert (answer["content"], answer["reasoning_content"]) == ("so", "hm")
    names = [(each["id"], each["function"]["name"]) for each in answer["tool_calls"]]
    assert names == [("c1", "f"), ("c2", "shell")]
    assert [message["content"] for message in found[2:]] == ["1", "2", "done", "really"]
    assert found[4]["reasoning_content"] == "in short" and "reasoning_content" not in found[5]


def test_built_in_tools_are_left_out_and_named(served: Served) -> None:
    text = prose(5)
    plain = create(served, input=text)
    tools: Any = [{"type": kind, "odd": [1]} for kind in BUILT_IN]
    response = create(served, input=text, tools=tools)
    assert response.omitted_tools == BUILT_IN and plain.omitted_tools == []
    assert response.output_text == plain.output_text and response.usage.input_tokens == plain.usage.input_tokens


def test_custom_tools_are_called_with_a_text(bytes_served: Served) -> None:
    asked: dict[str, Any] = {"tools": [CUSTOM], "max_output_tokens": 200, "input": "ab"}
    asked["tool_choice"] = {"type": "custom", "name": "shell"}
    biases = {"logit_bias": {str(bytes_served.model.tokenizer.convert_tokens_to_ids('"')): 20}}
    response = create(bytes_served, **asked, extra_body=biases)
    (call,) = response.output
    assert call.type == "custom_tool_call" and call.name == "shell" and not call.input.startswith("{")
    with bytes_served.client().responses.stream(model=NAME, temperature=0, **asked, extra_body=biases) as stream:
        found = list(stream)
    done = next(event for event in found if event.type == "response.custom_tool_call_input.done")
    assert done.input == call.input
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ab"}
    again = [{"role": "user", "content": "ab"}, call.model_dump(), output]
    assert create(bytes_served, input=again, tools=[CUSTOM]).usage.output_tokens


def test_input_items(served: Served) -> None:
    texts = [prose(3), prose(4)]
    first = create(served, input=texts[0])
    second = create(served, input=texts[1], previous_response_id=first.id)
    items = list(served.client().responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.content[0].text for item in items] == [texts[0], first.output_text, texts[1]]
    assert [item.role for item in items] == ["user", "assistant", "user"]
    newest = served.client().responses.input_items.list(second.id, limit=1)
    assert newest.data[0].content[0].text == texts[1] and newest.has_more
    url = f"{served.url}/v1/responses/{first.id}/input_items"
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "none"}):
        assert check_error(httpx.get(url, params=query, timeout=MOST_S), 400)["param"] == next(iter(query))
    check_error(httpx.get(f"{served.url}/v1/responses/none/input_items", timeout=MOST_S), 404)


def test_the_oldest_turns_are_left_out(served: Served) -> None:
    turns: list[Any] = []
    for _ in range(12):
        turns += [{"role": "user", "content": prose(POSITIONS // 8)}, {"role": "assistant", "content": prose(9)}]
    last, instructions = prose(20), prose(7)
    kept: list[Any] = []
    while len(encoded(served, instructions, [*turns[len(turns) - len(kept) - 2 :], user(last)])) <= POSITIONS - 8:
        kept = turns[len(turns) - len(kept) - 2 :]
    expected = create(served, instructions=instructions, input=[*kept, user(last)])
    asked: dict[str, Any] = {"instructions": instructions, "input": [*turns, user(last)]}
    found = create(served, truncation="auto", **asked)
    assert kept and found.usage.input_tokens == expected.usage.input_tokens and found.truncation == "auto"
    assert found.output_text == expected.output_text
    for how in ({}, {"truncation": "disabled"}):
        with pytest.raises(openai.BadRequestError, match="context"):
            create(served, **how, **asked)
    with pytest.raises(openai.BadRequestError, match="context"):
        create(served, truncation="auto", input=prose(POSITIONS + 1))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def encoded(served: Served, instructions: str, messages: list[Any]) -> Any:
    reader = replace(served.model.reader, context=None)
    return reader.encode_chat([{"role": "system", "content": instructions}, *messages], [], {})


def test_log_probabilities(served: Served) -> None:
    text = prose(random.randint(2, 9))
    chat = served.client().chat.completions.create(
        model=NAME, messages=[user(text)], max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    expected = [(each.token, each.logprob) for each in chat.choices[0].logprobs.content]
    asked: dict[str, Any] = {"input": text, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = create(served, **asked).output[0].content[0]
    assert [each.token for each in part.logprobs] == [token for token, _ in expected]
    assert [each.logprob for each in part.logprobs] == pytest.approx([chance for _, chance in expected], abs=1e-4)
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)
    asked |= {"model": NAME, "temperature": 0, "max_output_tokens": 8}
    with served.client().responses.stream(**asked) as stream:
        told = [each.token for e in stream if e.type == "response.output_text.delta" for each in e.logprobs]
    assert told == [token for token, _ in expected][: len(told)] and len(told) >= len(expected) - 1
    assert not create(served, input=text).output[0].content[0].logprobs


@pytest.mark.parametrize("kind", [None, 1, [], {}, "odd"])
def test_items_and_tools_of_no_type_are_refused(kind: Any, served: Served) -> None:
    odd: list[dict[str, Any]] = [{"input": [{"type": kind, "name": "f"}]}]
    odd += [] if kind == "odd" else [{"input": "aa", "tools": [{"type": kind, "name": "f"}]}]
    for body in odd:
        answer = httpx.post(f"{served.url}/v1/responses", json={"model": NAME, **body}, timeout=MOST_S)
        check_error(answer, 400)
