"""``/v1/messages``, as Anthropic's clients and Claude Code speak it."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from megakv.serving.http.anthropic import _arguments
from megakv.serving.http.anthropic_schemas import MessagesBody
from megakv.serving.http.blocks import Block
from megakv.serving.http.settings import ApiKeys, HttpSettings
from tests.distributed.models import prose
from tests.unit.serving.conftest import MOST_S, NAME, Served, running

OBJECT: dict[str, Any] = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
OBJECT["additionalProperties"] = False
TOOL: dict[str, Any] = {"name": "look", "description": "Looks.", "input_schema": OBJECT}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
BASH = {"type": "bash_20250124", "name": "bash"}


@pytest.fixture
def bytes_(bytes_served: Served) -> Served:
    return bytes_served


def user(text: Any = None) -> dict[str, Any]:
    return {"role": "user", "content": prose(random.randint(1, 20)) if text is None else text}


def post(url: str, path: str = "", headers: Any = None, **body: Any) -> httpx.Response:
    given = {"model": NAME, "max_tokens": 8, "temperature": 0, "messages": [user()], **body}
    return httpx.post(f"{url}/v1/messages{path}", json=given, headers=headers, timeout=MOST_S)


def answered(url: str, **body: Any) -> dict[str, Any]:
    answer = post(url, **body)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    assert (value["type"], value["role"], value["model"]) == ("message", "assistant", NAME)
    return value


def events(url: str, **body: Any) -> list[dict[str, Any]]:
    found = []
    answer = post(url, stream=True, **body)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    for event in answer.text.split("\n\n"):
        if event and not event.startswith(":"):
            kind, value = event.split("\n")
            found.append(json.loads(value.removeprefix("data: ")))
            assert kind == f"event: {found[-1]['type']}"
    return found


def put_together(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The blocks of a stream, whose events come in their order."""
    open_: dict[str, Any] | None = None
    for event in found:
        if event["type"] == "content_block_start":
            assert open_ is None
            open_, arguments = event["content_block"], ""
        elif event["type"] == "content_block_delta":
            assert open_ is not None
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                kind = delta["type"].removesuffix("_delta")
                open_[kind] += delta[kind]
        elif event["type"] == "content_block_stop":
            assert open_ is not None
            yield open_ | ({"input": json.loads(arguments)} if open_["type"] == "tool_use" else {})
            open_ = None
    assert open_ is None


def error_of(answer: httpx.Response, status: int, kind: str) -> str:
    value = answer.json()
    assert answer.status_code == status and value.keys() == {"type", "error"} and value["type"] == "error", value
    assert value["error"].keys() == {"type", "message"} and value["error"]["type"] == kind
    return str(value["error"]["message"])


def test_an_answer_is_the_chat_s(served: Served) -> None:
    messages, system = [user(), {"role": "assistant", "content": prose(3)}, user()], prose(5)
    chat = served.client().chat.completions.create(
        model=NAME,
        messages=[{"role": "system", "content": system}, *messages],
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    for given in (system, [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]):
        said = answered(
            served.url, messages=messages, system=given, metadata={"user_id": "x" * 400}, ignore_eos=True, odd=1
        )
        assert said["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
        assert (said["stop_reason"], said["stop_sequence"]) == ("max_tokens", None)
        usage = said["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.usage.prompt_tokens
        assert usage["output_tokens"] == 8 and usage["cache_read_input_tokens"] > 0
        counted = post(served.url, "/count_tokens", messages=messages, system=given, max_tokens=None)
        assert counted.json()["input_tokens"] == chat.usage.prompt_tokens


def test_streams(served: Served) -> None:
    messages = [user()]
    asked: dict[str, Any] = {"messages": messages, "ignore_eos": True}
    whole, found = answered(served.url, **asked), events(served.url, **asked)
    kinds = [event["type"] for event in found if event["type"] not in ("ping", "content_block_delta")]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert list(put_together(found)) == whole["content"]
    begun = found[0]["message"]
    assert begun["content"] == [] and begun["stop_reason"] is None and begun["usage"]["output_tokens"] <= 8
    assert begun["usage"]["cache_read_input_tokens"] > 0
    assert found[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 8


def test_stop_sequences(served: Served) -> None:
    asked: dict[str, Any] = {"messages": [user()], "ignore_eos": True}
    stop = answered(served.url, **asked)["content"][0]["text"].split()[-1]
    cut = answered(served.url, stop_sequences=["<never>", stop], **asked)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert events(served.url, stop_sequences=[stop], **asked)[-2]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": stop,
    }


def test_calls(bytes_: Served) -> None:
    asked: dict[str, Any] = {"tools": [SEARCH, TOOL, BASH], "max_tokens": 60, "messages": [user()]}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}):
        said = answered(bytes_.url, tool_choice=choice, **asked)
        (call,) = said["content"]
        assert call["type"] == "tool_use" and call["id"].startswith("toolu_") and call["name"] == "look"
        assert call["input"] in ({"kind": "a"}, {"kind": "b"})
        assert said["stop_reason"] == "tool_use" and said["omitted_tools"] == ["web_search", "bash"]
        found = events(bytes_.url, tool_choice=choice, **asked)
        (streamed,) = put_together(found)
        assert streamed | {"id": ""} == call | {"id": ""} and found[0]["message"]["omitted_tools"]
        assert found[-2]["delta"]["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "no"}]}
        again = [*asked["messages"], {"role": "assistant", "content": said["content"]}, user([result])]
        assert answered(bytes_.url, **{**asked, "messages": again})["usage"]["output_tokens"]


def test_conversations_are_chats() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"kind": "é"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "none"}
    empty = {"type": "tool_result", "tool_use_id": "t2"}
    thought = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
    said = {"role": "assistant", "content": [*thought, {"type": "text", "text": "so"}, call]}
    body = MessagesBody.read(
        {
            "model": NAME,
            "max_tokens": 1,
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"}]
            + [{"type": "text", "text": text} for text in ("one", "two")],
            "messages": [user("hi"), said, user([result, empty, {"type": "text", "text": "on"}])],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "top_k": 3,
        }
    )
    (given,) = body.messages[2].tool_calls or []
    assert (given.id, given.function.name, json.loads(given.function.arguments or "")) == ("t1", "look", {"kind": "é"})
    messages = [message.model_dump(exclude_none=True, exclude={"tool_calls"}) for message in body.messages]
    assert messages == [
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "none"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "on"},
    ]
    assert body.chat_template_kwargs == {"enable_thinking": True} and body.top_k == 3


def test_a_changing_header_keeps_prefixes(served: Served) -> None:
    counts = []
    for number in range(2):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"}
        system = [billing, {"type": "text", "text": prose(3)}]
        counts.append(post(served.url, "/count_tokens", messages=[user("a")], system=system).json()["input_tokens"])
    plain = post(served.url, "/count_tokens", messages=[user("a")], system=prose(3)).json()["input_tokens"]
    assert counts == [plain, plain]


def test_what_is_asked_beyond_the_limits_is_clamped(served: Served) -> None:
    assert answered(served.url, max_tokens=100_000)["stop_reason"] in ("max_tokens", "end_turn")


def test_errors(served: Served) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    assert "'image'" in error_of(post(served.url, messages=[user([image])]), 400, "invalid_request_error")
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    assert "'image'" in error_of(post(served.url, messages=[user([result])]), 400, "invalid_request_error")
    assert "messages" in error_of(post(served.url, messages=[]), 400, "invalid_request_error")
    for kind in (None, 1, [], {}, "odd"):
        error_of(post(served.url, messages=[user([{"type": kind}])]), 400, "invalid_request_error")
    error_of(httpx.get(f"{served.url}/v1/messages"), 405, "invalid_request_error")
    error_of(httpx.get(f"{served.url}/v1/messages/none"), 404, "not_found_error")
    assert httpx.get(f"{served.url}/v1/messagesx").json().keys() == {"error"}


def test_keys(loop: Any, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef-one\n")
    with running(loop, HttpSettings(NAME, port=0, keys=ApiKeys.read(str(keys)))) as url:
        error_of(post(url), 401, "authentication_error")
        error_of(post(url, headers={"x-api-key": "0123456789abcdef-two"}), 401, "authentication_error")
        for headers in ({"x-api-key": "0123456789abcdef-one"}, {"authorization": "Bearer 0123456789abcdef-one"}):
            assert post(url, headers={**headers, "anthropic-version": "2023-06-01"}).status_code == 200


def test_fields_of_all_endpoints_hold_here(bytes_: Served) -> None:
    form = {"json": OBJECT}
    text = answered(bytes_.url, max_tokens=60, structured_outputs=form)["content"][0]["text"]
    assert json.loads(text)["kind"] in ("a", "b")
    ended = answered(bytes_.url, max_tokens=60, structured_outputs={"choice": ["abcd"]}, stop=["c"])
    assert ended["content"][0]["text"] == "ab" and ended["stop_reason"] == "stop_sequence"


def test_halves_of_letters_in_calls() -> None:
    block = Block("call", 0, "look", '{"a":"\\ud800","b":["x\\udfff"]}')
    assert _arguments(block) == {"a": "?", "b": ["x?"]}
