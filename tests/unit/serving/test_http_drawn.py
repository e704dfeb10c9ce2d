"""Bodies drawn at random, right ones and changed ones: each is answered, or refused by the name of a field of it."""

import copy
import random
import re
from typing import Any

import httpx
import pytest

from tests.unit.serving.conftest import MOST_S, NAME, Served, check_error

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "says", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SAMPLING: dict[str, list[Any]] = {
    "model": [NAME, None, "gpt", ""], "temperature": [0, 0.7, 2, None], "top_p": [0, 0.5, 1, None], "top_k": [-1, 0, 5],
    "min_p": [0, 0.1], "presence_penalty": [-2, 1.5], "frequency_penalty": [0.5], "repetition_penalty": [1.2],
    "logit_bias": [{}, {"5": -100, "7": 3.5}], "seed": [0, 7, -3], "stop": [None, "a", ["b", "ab"], []],
    "stream": [False, True], "user": ["somebody"], "ignore_eos": [True], "priority": [3], "prompt_lookup": [0, 4],
    "metadata": [{"a": 1}, None], "service_tier": ["auto"], "stream_options": [None],
}  # fmt: skip
CHATS: dict[str, list[Any]] = {
    "max_tokens": [0, 1, 3, None], "max_completion_tokens": [2, 0], "n": [1, 2, None], "logprobs": [True, False],
    "tools": [[TOOL], []], "tool_choice": ["auto", "none", None], "response_format": [{"type": "text"}, None],
    "parallel_tool_calls": [True], "reasoning_effort": ["low"], "verbosity": ["low"], "store": [True],
}  # fmt: skip
COMPLETIONS: dict[str, list[Any]] = {
    "max_tokens": [0, 1, 3, None], "n": [1, 2], "logprobs": [0, 3, None], "echo": [False, True], "best_of": [None],
    "prompt_logprobs": [None, 0, 2],
}  # fmt: skip
RESPONSES: dict[str, list[Any]] = {
    "max_output_tokens": [0, 1, 3], "instructions": ["be aa", None], "store": [True, False], "include": [[]],
    "truncation": ["disabled"], "text": [{"format": {"type": "text"}}], "reasoning": [{"effort": "low"}],
}  # fmt: skip
UNKNOWN: dict[str, list[Any]] = {
    "cache_control": [{"type": "ephemeral"}], "provider_specific_fields": [{"x": None}], "litellm_call_id": ["1"],
    "a field of nobody": [1, [{}], "x"], "suffix": [None, "x"], "functions": [[], [FUNCTION]],
    "modalities": [["text"], ["audio"]], "logits_processors": [["x"]], "use_beam_search": [False, True], "é": ["漢"],
}  # fmt: skip
PARTS: list[dict[str, Any]] = [
    {"type": "text", "text": "aa", "cache_control": {"type": "ephemeral"}},
    {"type": "refusal", "refusal": "no"},
    {"type": "image_url", "image_url": {"url": "data:,"}},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "aa ab"},
    {"role": "user", "content": PARTS[:1], "name": "x"},
    {"role": "system", "content": "be b"},
    {"role": "developer", "content": ""},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "ba", "reasoning": "hm", "refusal": None, "parsed": {"a": 1}, "annotations": []},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "function_call": None, "audio": None},
    {"role": "assistant", "content": PARTS[:2], "thinking_blocks": [{"type": "thinking", "thinking": "hm"}]},
    {"role": "assistant", "refusal": "no", "tool_calls": []},
    {"role": "tool", "content": "1", "tool_call_id": "call_1"},
]
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "aa", "type": "message"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}], "id": "msg_1"},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
]
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2.5,
    10**30,
    "",
    "text",
    [],
    [[]],
    {},
    {"a": 1},
    [None],
    "x" * 300,
    PARTS,
]


def drawn(pool: dict[str, list[Any]], most: int) -> dict[str, Any]:
    names = random.sample(sorted(pool), k=random.randint(0, min(most, len(pool))))
    return {name: copy.deepcopy(random.choice(pool[name])) for name in names}


def conversation(pool: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return copy.deepcopy([*random.choices(pool, k=random.randint(0, 4)), pool[0]])


def body(path: str) -> dict[str, Any]:
    """A right one."""
    match path:
        case "/v1/chat/completions":
            return {"max_tokens": 2, "messages": conversation(MESSAGES)} | drawn(SAMPLING, 5) | drawn(CHATS, 3)
        case "/v1/completions":
            prompt = random.choice(["aa ab", ["aa", "b"], [5, 6, 7], [[5], [6, 7]]])
            return {"prompt": prompt, "max_tokens": 2} | drawn(SAMPLING, 5) | drawn(COMPLETIONS, 3)
        case "/v1/responses":
            given = random.choice(["aa", conversation(ITEMS)])
            return {"input": given, "max_output_tokens": 2} | drawn(SAMPLING, 5) | drawn(RESPONSES, 3)
        case "/tokenize":
            return random.choice([{"prompt": "aa é"}, {"messages": conversation(MESSAGES)}])
    return {"tokens": random.choices(range(260), k=random.randint(0, 9))}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every key of an object and index of a list within a value, with what it is of."""
    found = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += [(value, key), *places(inner)]
    return found


def mutate(value: dict[str, Any]) -> None:
    """Change something somewhere: another value, none at all, another name, one more."""
    for _ in range(random.randint(1, 3)):
        if not (found := places(value)):
            return
        holder, key = random.choice(found)
        match random.randrange(4):
            case 0 | 1:
                holder[key] = copy.deepcopy(random.choice(ODD))
            case 2:
                del holder[key]
            case 3 if isinstance(holder, dict):
                holder[f"{key}_"] = holder.pop(key)


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
NAMES = re.compile(r"[A-Za-z_]\w*")
NAMELESS = ("missing_required_parameter", "empty_prompt", "invalid_json")


def test_every_body_is_answered_or_one_of_its_fields_is_named(served: Served, pytestconfig: pytest.Config) -> None:
    count = pytestconfig.getoption("--cases") or (20_000 if pytestconfig.getoption("--full") else 300)
    answered = refused = 0
    with httpx.Client(base_url=served.url, timeout=MOST_S) as client:
        for number in range(count):
            path = random.choice(PATHS)
            sent = body(path) | (drawn(UNKNOWN, 2) if number % 3 else {})
            right = number % 3 == 0
            if number % 3 == 2:
                mutate(sent)
            answer = client.post(path, json=sent)
            if answer.status_code == 200:
                assert '"error": {' not in answer.text, (sent, answer.text)
                answered += 1
                continue
            assert not right, (path, sent, answer.text)
            error = check_error(answer, 400)
            refused += 1
            named = error["param"] or error["message"].partition(":")[0]
            top = next(iter(NAMES.findall(named)), "")
            nothing_there = error["code"] in NAMELESS or (path == "/tokenize" and not error["param"])
            assert top in sent or nothing_there, (path, sent, answer.text)
            assert not any(word in error["message"] for word in ("constrained", "Input should", "Value error", "[key]"))
        assert answered > count / 3 and refused
        assert client.get("/health").json() == {"status": "ok"}
