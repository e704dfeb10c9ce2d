"""What the model writes wrongly is text; what fails within an answer ends it alone, by an error that clients know."""

import copy
import http.client
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from megakv.serving.http.parts import CONTEXT_TOKENS
from megakv.serving.http.settings import HttpSettings
from tests.distributed.models import prose
from tests.unit.serving.conftest import MOST_S, NAME, Served, running

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CALLS: dict[str, Any] = {
    "start_anchor": "<assistant>",
    "fields": {
        # Every word is a call, and none of them one that can be read.
        "tool_calls": {
            "open_pattern": r"\s*[a-z]",
            "close": " ",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def body(path: str, **more: Any) -> dict[str, Any]:
    text = prose(8)
    asked: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": 9},
        COMPLETIONS: {"prompt": text, "max_tokens": 9},
        RESPONSES: {"input": text, "max_output_tokens": 9},
    }[path]
    return {"model": NAME, "temperature": 0, "ignore_eos": True, **asked, **more}


@pytest.fixture(scope="module")
def misread(served: Served) -> Iterator[Served]:
    model = replace(served.model, answer_template=CALLS)
    with running((served.loop, model), HttpSettings(NAME, port=0)) as url:
        yield replace(served, model=model, url=url)


@pytest.fixture(scope="module")
def broken(served: Served) -> Iterator[Served]:
    """One whose tokenizer fails at an answer's seventh token, whatever it decodes together with its prompt's end."""
    tokenizer = copy.copy(served.model.tokenizer)

    def decode(tokens: list[int], **options: Any) -> str:
        if len(tokens) >= 3 + CONTEXT_TOKENS:
            raise RuntimeError("no such text")
        return served.model.tokenizer.decode(tokens, **options)

    tokenizer.decode = decode
    model = replace(served.model, tokenizer=tokenizer)
    with running((served.loop, model), HttpSettings(NAME, port=0)) as url:
        yield replace(served, model=model, url=url)


class Connection:
    """One that is never opened again."""

    def __init__(self, url: str):
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=MOST_S)
        self._connection.connect()
        self._connection.auto_open = 0

    def ask(self, path: str, asked: dict[str, Any] | None = None) -> tuple[int, str]:
        content = None if asked is None else json.dumps(asked)
        self._connection.request(
            "GET" if asked is None else "POST", path, content, {"content-type": "application/json"}
        )
        answer = self._connection.getresponse()
        return answer.status, answer.read().decode()

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def connection(broken: Served) -> Iterator[Connection]:
    made = Connection(broken.url)
    yield made
    made.close()


def test_words_that_are_no_calls_are_text(misread: Served) -> None:
    client = misread.client()
    for _ in range(3):
        text, most = prose(random.randint(3, 30)), random.randint(2, 12)
        messages: Any = [{"role": "user", "content": text}]
        prompt = list(misread.model.reader.encode_chat(messages, [], {}))
        tokens = misread.greedy(prompt, most)
        ended = tokens[-1] in misread.model.end_ids
        expected = misread.model.tokenizer.decode(tokens[: len(tokens) - ended])
        asked: dict[str, Any] = {"model": NAME, "temperature": 0}
        whole = client.chat.completions.create(messages=messages, max_tokens=most, n=2, **asked)
        for choice in whole.choices:
            assert (choice.message.content, choice.message.tool_calls) == (expected, None)
            assert choice.finish_reason == ("stop" if ended else "length")
        chunks = list(client.chat.completions.create(messages=messages, max_tokens=most, stream=True, **asked))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == ("stop" if ended else "length")
        assert client.responses.create(input=text, max_output_tokens=most, **asked).output_text == expected
        with client.responses.stream(input=text, max_output_tokens=most, **asked) as stream:
            assert "".join(each.delta for each in stream if each.type == "response.output_text.delta") == expected


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_an_answer_that_fails_is_an_error_on_a_connection_that_goes_on(
    path: str, broken: Served, connection: Connection
) -> None:
    for _ in range(2):
        status, content = connection.ask(path, body(path))
        error = json.loads(content)["error"]
        assert (status, error["type"], error["code"]) == (500, "server_error", "internal_error")
        assert "no such text" not in content
        assert connection.ask("/health")[0] == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_a_stream_that_fails_ends_with_an_error(path: str, broken: Served, connection: Connection) -> None:
    for _ in range(2):
        status, content = connection.ask(path, body(path, stream=True))
        *_, last = [line[6:] for line in content.splitlines() if line.startswith("data: ")]
        assert status == 200 and "[DONE]" not in content and "no such text" not in content
        if path == RESPONSES:
            error = json.loads(last)["response"]["error"]
            assert json.loads(last)["type"] == "response.failed" and error["code"] == "server_error"
        else:
            assert json.loads(last)["error"]["code"] == "internal_error"
        assert connection.ask("/health")[0] == 200
    deadline = time.monotonic() + MOST_S
    while broken.loop.stats().running:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_openais_client_hears_of_it(broken: Served) -> None:
    client, asked = broken.client(), body(CHAT)
    asked["extra_body"] = {"ignore_eos": asked.pop("ignore_eos")}
    with pytest.raises(openai.InternalServerError, match="the server failed at this request"):
        client.chat.completions.create(**asked)
    with pytest.raises(openai.APIError, match="the server failed at this request"):
        list(client.chat.completions.create(**asked, stream=True))
