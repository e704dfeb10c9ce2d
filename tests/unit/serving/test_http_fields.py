"""Fields that no endpoint knows, what clients send back, and how long an answer may be."""

import random
from typing import Any

import httpx
import pytest

from megakv.serving.http.message_schemas import Message
from tests.unit.serving.conftest import MOST_S, NAME, Served, check_error

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "aa ab"}
ENDPOINTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 2},
    COMPLETIONS: {"prompt": "aa ab", "max_tokens": 2},
    RESPONSES: {"input": "aa ab", "max_output_tokens": 2},
}


def post(served: Served, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(served.url + path, json={"model": NAME, **ENDPOINTS.get(path, {}), **fields}, timeout=MOST_S)


def passed(served: Served) -> dict[str, float]:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    name = "megakv_fields_passed_over_total{"
    found = (line.removeprefix(name).rpartition(" ") for line in lines if line.startswith(name))
    return {label: float(value) for label, _, value in found}


HINT, UNKNOWN = 'kind="known hint"}', 'kind="unknown"}'


@pytest.mark.parametrize("path", ENDPOINTS)
def test_hints_and_unknown_fields_are_passed_over_and_counted(path: str, served: Served) -> None:
    hints: dict[str, Any] = {
        "cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": 1}, "prediction": {"content": "a"},
        "web_search_options": {}, "reasoning_details": [1], "session_id": "x", "suffix": None, "functions": [],
        "best_of": 1, "modalities": ["text"], "use_beam_search": False, "length_penalty": 1.0, "echo": False,
    }  # fmt: skip
    unknown = {"secret word": 1, "é": [{"a": 1}], "\n": None}
    known = {name for name in hints if not (path == COMPLETIONS and name in ("echo", "best_of"))}
    before = passed(served)
    answer = post(served, path, **hints, **unknown)
    assert answer.status_code == 200, answer.text
    after = passed(served)
    assert after.keys() == {HINT, UNKNOWN}
    assert (after[HINT] - before[HINT], after[UNKNOWN] - before[UNKNOWN]) == (len(known), len(unknown))
    plain = post(served, path, seed=1).json()
    assert answer.json().keys() == plain.keys() and answer.headers.keys() == httpx.Headers(answer.headers).keys()
    assert "secret" not in httpx.get(f"{served.url}/metrics").text and "secret" not in str(answer.headers)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"), ("top_a", 0.5), ("modalities", ["text", "audio"]), ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}), ("logits_processors", ["x"]), ("use_beam_search", True),
        ("length_penalty", 2), ("no_repeat_ngram_size", 3), ("xtc_probability", 0.5), ("bad_words", ["a"]),
        ("chat_template", "{{ 1 }}"), ("repeat_penalty", 1.2), ("extra_body", {"top_k": 1}), ("raw", True),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_its_name(path: str, name: str, value: Any, served: Served) -> None:
    error = check_error(post(served, path, **{name: value}), 400)
    assert error["param"] == name and error["code"] == "unsupported_value" and error["message"].startswith(f"{name}: ")


def test_fields_of_another_endpoint_are_no_hints(served: Served) -> None:
    for path, name, value in [
        (COMPLETIONS, "messages", [USER]),
        (COMPLETIONS, "tools", [{}]),
        (RESPONSES, "max_tokens", 3),
        (COMPLETIONS, "max_output_tokens", 3),
        (RESPONSES, "n", 2),
        (CHAT, "prompt", "a"),
    ]:
        error = check_error(post(served, path, **{name: value}), 400)
        assert error["param"] == name and error["code"] == "unsupported_value"
    assert "use max_output_tokens" in check_error(post(served, RESPONSES, max_tokens=3), 400)["message"]
    assert "use max_tokens" in check_error(post(served, COMPLETIONS, max_output_tokens=3), 400)["message"]
    assert post(served, RESPONSES, n=1).status_code == post(served, COMPLETIONS, tools=[]).status_code == 200


def test_the_number_of_fields_is_bounded(served: Served) -> None:
    fields = {f"field_{number}": number for number in range(126)}
    assert post(served, CHAT, **dict(list(fields.items())[:125])).status_code == 200
    assert "has 129 fields; allowed: 128" in check_error(post(served, CHAT, **fields), 400)["message"]


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID: list[tuple[dict[str, Any], str]] = [
    ({"content": None}, ""),
    ({}, ""),
    ({"content": []}, ""),
    ({"content": None, "tool_calls": [], "function_call": None, "audio": None, "annotations": []}, ""),
    ({"content": None, "tool_calls": None}, ""),
    ({"content": '{"a": 1}', "parsed": {"a": 1}, "refusal": None}, '{"a": 1}'),
    ({"content": None, "refusal": "no aa"}, "no aa"),
    ({"content": [{"type": "refusal", "refusal": "no aa"}]}, "no aa"),
    ({"content": [{"type": "text", "text": "ab", "cache_control": {"type": "ephemeral"}}]}, "ab"),
    ({"content": "ab", "provider_specific_fields": {"refusal": None}, "images": []}, "ab"),
]


@pytest.mark.parametrize(("fields", "text"), SAID, ids=range(len(SAID)))
def test_answers_come_back_without_loss(fields: dict[str, Any], text: str, served: Served) -> None:
    def tokens(message: dict[str, Any]) -> list[int]:
        answer = post(served, "/tokenize", messages=[USER, message, USER])
        assert answer.status_code == 200, answer.text
        return list(answer.json()["tokens"])

    message = {"role": "assistant", **fields}
    assert tokens(message) == tokens({"role": "assistant", "content": text})
    assert post(served, CHAT, messages=[USER, message, USER]).status_code == 200


def test_reasoning_comes_back_by_any_name() -> None:
    blocks = [{"type": "thinking", "thinking": "a b", "signature": "x"}, {"type": "redacted_thinking", "data": "x"}]
    for fields in ({"reasoning_content": "a b"}, {"reasoning": "a b"}, {"thinking_blocks": blocks}):
        message = Message.model_validate({"role": "assistant", "content": "c", **fields})
        assert message.reasoning_content == "a b" and message.template_values()["reasoning_content"] == "a b"
    for fields in ({"reasoning": None}, {"reasoning": {"effort": "low"}}, {"thinking_blocks": []}):
        assert Message.model_validate({"role": "assistant", **fields}).reasoning_content is None


@pytest.mark.parametrize("path", ENDPOINTS)
def test_ceilings_are_not_demands(path: str, served: Served) -> None:
    longest = "max_output_tokens" if path == RESPONSES else "max_tokens"
    context, read = served.model.context, post(served, path).json()["usage"]
    room = context - read.get("prompt_tokens", read.get("input_tokens"))
    for most in (5000, 10**30, -1):
        answer = post(served, path, **{longest: most}, ignore_eos=True).json()
        made = answer["usage"].get("completion_tokens", answer["usage"].get("output_tokens"))
        assert made == room
        assert answer["choices"][0]["finish_reason"] == "length" if path != RESPONSES else made


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_no_tokens_reads_its_prompt(stream: bool, served: Served) -> None:
    client = served.client()
    prompt = random.sample(range(5, served.model.vocabulary), k=8)
    if stream:
        options: Any = {"include_usage": True}
        chunks = list(client.completions.create(
            model=NAME, prompt=prompt, max_tokens=0, stream=True, stream_options=options
        ))  # fmt: skip
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == "" and choices[-1].finish_reason == "length"
        assert chunks[-1].usage.completion_tokens == 0 and chunks[-1].usage.prompt_tokens == 8
    else:
        answer = client.chat.completions.create(model=NAME, messages=[USER], max_completion_tokens=0, n=2)
        assert [(c.message.content, c.finish_reason) for c in answer.choices] == [("", "length")] * 2
        assert answer.usage.completion_tokens == 0
        assert client.responses.create(model=NAME, input="aa", max_output_tokens=0).output_text == ""


def test_a_prompt_that_does_not_fit_has_a_code_of_its_own(served: Served) -> None:
    context = served.model.context
    for count, status in ((context - 1, 200), (context, 400), (context + 1, 400)):
        answer = post(served, COMPLETIONS, prompt=[5] * count, max_tokens=9)
        assert answer.status_code == status
        if status == 400:
            error = check_error(answer, 400)
            assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert check_error(post(served, CHAT, n=99), 400)["code"] != "context_length_exceeded"


def test_prompts_of_one_call_have_each_their_own_room(served: Served) -> None:
    prompts = [[5] * (served.model.context - room) for room in (3, 7)]
    answer = post(served, COMPLETIONS, prompt=prompts, max_tokens=5000, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 10


def test_no_share_of_tokens_is_the_likeliest_one(served: Served) -> None:
    answers = [post(served, COMPLETIONS, max_tokens=8, **how).json() for how in ({"top_p": 0}, {"temperature": 0})]
    assert answers[0]["choices"] == answers[1]["choices"]
