"""Whatever a stranger sends as a body is answered with an error object, and the server goes on."""

import json
import random
from typing import Any

import httpx
import pytest

from megakv.serving.http.settings import HttpSettings
from tests.unit.serving.conftest import MOST_S, NAME, Served, check_error, running

BODIES = 500
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "aa ab"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "aa ab", "max_tokens": 2},
    "/v1/responses": {"input": "aa ab", "max_output_tokens": 2},
}
OTHERS: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "n": 2, "stream": False, "stop": ["x"], "logit_bias": {"3": 1}, "seed": 1,
    "presence_penalty": 0.5, "user": "somebody", "top_k": 3, "min_p": 0.1, "logprobs": 1, "priority": 3,
}  # fmt: skip
WRONG: list[Any] = [
    None, True, -1, 0, 1.5, 10**30, -(10**30), "", "text", "1", [], [[]], {}, {"a": 1}, [None], ["\ud800"], "\x00" * 5,
    ["a"] * 100, float("nan"), float("inf"), 1e308, {"role": "user"}, [{"role": "nobody", "content": 3}], "é" * 3000,
]  # fmt: skip


def valid(path: str) -> dict[str, Any]:
    return {"model": NAME, **json.loads(json.dumps(ENDPOINTS[path]))}


def mangled(body: bytes) -> bytes:
    """What a broken client or a fuzzer sends."""
    data = bytearray(body)
    match random.randrange(6):
        case 0:
            del data[random.randrange(len(data)) :]
        case 1:
            for _ in range(random.randint(1, 8)):
                data[random.randrange(len(data))] = random.randrange(256)
        case 2:
            data[random.randrange(len(data)) : 0] = random.randbytes(random.randint(1, 20))
        case 3:
            return random.randbytes(random.randint(0, 200))
        case 4:
            return (b"[" * 100_000, b'{"a":' * 50_000, b'"' * 999, b"NaN", b"1" * 10_000, b"\xff\xfe" + body)[
                random.randrange(6)
            ]
        case 5:
            return (
                b'{"model": NaN, "model": Infinity, "n": 1e999, "max_tokens": ' + b"9" * random.randint(1, 9999) + b"}"
            )
    return bytes(data)


def wrong(path: str) -> bytes:
    """With values of wrong types, or fields that are none."""
    body = {**valid(path), **dict(random.sample(sorted(OTHERS.items()), k=3))}
    for name in random.sample(sorted(body), k=random.randint(1, 3)):
        body[name if random.random() < 0.8 else name + "s"] = random.choice(WRONG)
    return json.dumps(body).encode()


def test_no_body_gets_more_than_an_error(served: Served) -> None:
    refused = 0
    with httpx.Client(base_url=served.url, timeout=MOST_S, headers={"content-type": "application/json"}) as client:
        for number in range(BODIES):
            path = random.choice(sorted(ENDPOINTS))
            content = wrong(path) if number % 2 else mangled(json.dumps(valid(path)).encode())
            answer = client.post(path, content=content)
            # Some changes leave a body that can be answered.
            if answer.status_code != 200:
                check_error(answer, 400, 404)
                refused += 1
        assert refused > BODIES / 2
        assert client.get("/health").json() == {"status": "ok"}
        for path in ENDPOINTS:
            assert client.post(path, json=valid(path)).status_code == 200


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
TEXT = {"type": "text", "text": "aa"}


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        (CHAT, {"max_tokens": -2}, "max_tokens: -2 is not allowed; allowed: -1 or more"),
        (CHAT, {"max_tokens": "7"}, "max_tokens: '7' is not allowed; allowed: a whole number"),
        (CHAT, {"max_tokens": True}, "max_tokens: true is not allowed; allowed: a whole number"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens: 1.5 is not allowed; allowed: a whole number"),
        (CHAT, {"n": 0}, "n:"),
        (CHAT, {"n": 17}, "n: 17 answers in one call; allowed: 16"),
        (CHAT, {"temperature": -0.1}, "temperature"),
        (CHAT, {"temperature": 1e300}, "temperature"),
        (CHAT, {"top_p": 1.1}, "top_p"),
        (CHAT, {"stop": ["x"] * 17}, "stop: an array is not allowed; allowed: text or 16 entries at most"),
        (CHAT, {"stop": 3}, "stop: 3 is not allowed; allowed: text or an array"),
        (CHAT, {"stop": ["x", 3]}, "stop[1]: 3 is not allowed; allowed: text"),
        (CHAT, {"stop": ""}, "stop: '' is not allowed; allowed: text of 1 letters or more"),
        (CHAT, {"stop": ["x" * 1025]}, "stop"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias: 'a' is no token"),
        (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias: '99999' is no token"),
        (CHAT, {"logit_bias": {"²": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias"),
        (CHAT, {"logit_bias": {str(token): 0 for token in range(1025)}}, "logit_bias"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "needs text"),
        *(
            (
                CHAT,
                {"messages": [{"role": "user", "content": [TEXT, {"type": kind, kind: {}}]}]},
                f"messages[0].content: {kind}: this server reads text only, no {what}",
            )
            for kind, what in (("image_url", "images"), ("input_audio", "sound"))
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input_image: this server reads text only, no images",
        ),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"generation_config": "[]"}, "generation_config"),
        (CHAT, {"generation_config": '{"temperature": "warm"}'}, "generation_config: temperature"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template is not for requests to say"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "tokenize is not for requests to say"),
        (CHAT, {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role: 'nobody' is not allowed"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text: it is r"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": 7}]},
            "messages[0].content: 7 is not allowed; allowed: text or",
        ),
        (CHAT, {"messages": None}, "messages: null is not allowed; allowed: an array"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "no tokens"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt: -1 is no token"),
        (COMPLETIONS, {"prompt": [10**9]}, "is no token"),
        (COMPLETIONS, {"prompt": "aa " * 600}, "context of 512"),
        (COMPLETIONS, {"prompt": "a" * 1_000_000}, "context of 512"),
        (COMPLETIONS, {"prompt": "aa", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": ["aa"] * 6, "n": 3}, "n: 18 answers"),
    ],
)
def test_what_is_wrong_is_named(path: str, change: dict[str, Any], named: str, served: Served) -> None:
    body = {**valid(path), **change}
    answer = httpx.post(served.url + path, json=body, timeout=MOST_S)
    assert named in check_error(answer, 400)["message"]


def test_any_model_is_the_one_that_is_served(served: Served) -> None:
    for path in ENDPOINTS:
        for named in ({"model": "gpt"}, {"model": None}, {}):
            body = {name: value for name, value in valid(path).items() if name != "model"}
            answer = httpx.post(served.url + path, json={**body, **named}, timeout=MOST_S)
            assert answer.status_code == 200 and answer.json()["model"] == NAME
    check_error(httpx.get(f"{served.url}/v1/models/gpt"), 404)


def test_a_strict_server_names_an_unknown_model(served: Served) -> None:
    with running((served.loop, served.model), HttpSettings(NAME, port=0, strict_model=True)) as url:
        for path in ENDPOINTS:
            error = check_error(httpx.post(url + path, json={**valid(path), "model": "gpt"}), 404)
            assert error["code"] == "model_not_found" and "'gpt'" in error["message"] and NAME in error["message"]
            assert httpx.post(url + path, json={**valid(path), "model": None}, timeout=MOST_S).status_code == 200
        check_error(httpx.post(f"{url}/tokenize", json={"prompt": "aa", "model": "gpt"}), 404)


def test_paths_and_methods(served: Served) -> None:
    for path in ("/nothing", "/v1", "/docs", "/openapi.json", "/reset", "/../etc/passwd", "/v1/responses/resp_none"):
        check_error(httpx.get(served.url + path), 404)
    check_error(httpx.get(served.url + CHAT), 405)
    check_error(httpx.put(served.url + "/health"), 405)
    check_error(httpx.request("BREW", served.url + CHAT), 405)
    error = check_error(
        httpx.post(served.url + CHAT, content=json.dumps(valid(CHAT)), headers={"content-type": "text/plain"}), 415
    )
    assert "application/json" in error["message"]
