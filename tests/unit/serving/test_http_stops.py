"""Where answers end, and what of that is in their text, as vLLM's fields have it."""

import random
from typing import Any

import httpx
import pytest

from tests.distributed.models import prose
from tests.unit.serving.conftest import MOST_S, NAME, Served, check_error


def ask(served: Served, text: str, **fields: Any) -> Any:
    """A greedy answer that does not end by itself."""
    body = {"model": NAME, "prompt": text, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=MOST_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def text() -> str:
    return prose(random.randint(3, 30))


def test_one_of_these_tokens_ends_it(served: Served, text: str) -> None:
    whole = ask(served, text, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    tokenizer = served.model.tokenizer
    vocabulary = {
        tokenizer.decode([token], clean_up_tokenization_spaces=False): token for token in range(len(tokenizer))
    }
    at = random.randrange(1, 40)
    first = whole.index(whole[at])
    stop = vocabulary[whole[at]]
    ended = ask(served, text, stop_token_ids=[stop])
    assert ended["choices"][0]["finish_reason"] == "stop" and ended["usage"]["completion_tokens"] == first + 1
    shown = ask(served, text, stop_token_ids=[stop], include_stop_str_in_output=True)["choices"][0]["text"]
    assert shown.startswith(ended["choices"][0]["text"]) and len(shown) > len(ended["choices"][0]["text"])
    assert ask(served, text)["choices"][0]["text"].startswith(shown)


def test_the_text_that_stops_it_can_be_shown(served: Served, text: str) -> None:
    whole = ask(served, text)["choices"][0]["text"]
    at = random.randrange(len(whole) - 3)
    stop = whole[at : at + 3]
    cut = whole.index(stop)
    assert ask(served, text, stop=stop)["choices"][0]["text"] == whole[:cut]
    shown = ask(served, text, stop=[stop], include_stop_str_in_output=True)["choices"][0]
    assert shown["text"] == whole[: cut + 3] and shown["finish_reason"] == "stop"


def test_nothing_ends_it_before_so_many_tokens(served: Served, text: str) -> None:
    """Neither an end nor one of some tokens, which would be the likeliest, nor a text."""
    stop, bias = random.randrange(10, 60), random.randrange(5, 20)
    fields: Any = {"stop_token_ids": [stop], "logit_bias": {str(stop): 100.0}, "logprobs": 0}
    assert ask(served, text, **fields)["usage"]["completion_tokens"] == 1
    late = ask(served, text, min_tokens=bias, **fields)
    assert late["usage"]["completion_tokens"] == bias + 1 and late["choices"][0]["finish_reason"] == "stop"
    end = min(served.model.end_ids)
    ended = ask(served, text, ignore_eos=False, min_tokens=bias, logit_bias={str(end): 100.0})
    assert ended["usage"]["completion_tokens"] == bias + 1
    # With a text that is everywhere.
    letters = ask(served, text, stop=["e", " ", "a", "t"], min_tokens=bias)
    assert letters["usage"]["completion_tokens"] > bias


def test_special_tokens_are_shown_where_that_is_asked_for(served: Served, text: str) -> None:
    end = min(served.model.end_ids)
    fields: Any = {"logit_bias": {str(end): 100.0}, "max_tokens": 2}
    name = served.model.tokenizer.decode([end])
    assert name and ask(served, text, **fields)["choices"][0]["text"] == ""
    assert ask(served, text, skip_special_tokens=True, **fields)["choices"][0]["text"] == ""
    shown = ask(served, text, skip_special_tokens=False, **fields)["choices"][0]["text"]
    assert shown.replace(" ", "") == name * 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop_token_ids": [1 << 20]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(2000))}, "stop_token_ids"),
        ({"min_tokens": 41}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ],
)
def test_what_cannot_be_is_said(served: Served, fields: dict[str, Any], says: str) -> None:
    body = {"model": NAME, "prompt": "x", "max_tokens": 40, **fields}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=MOST_S)
    assert says in check_error(answer, 400)["message"]


def test_best_of_as_many_as_are_answered(served: Served, text: str) -> None:
    found = ask(served, text, n=2, best_of=2, suffix="", temperature=1, seed=3)["choices"]
    assert [choice["text"] for choice in found] == [
        choice["text"] for choice in ask(served, text, n=2, temperature=1, seed=3)["choices"]
    ]


def test_special_tokens_that_have_no_role_are_stops_too(bytes_served: Served) -> None:
    number = bytes_served.model.tokenizer.convert_tokens_to_ids("<user>")
    answer = ask(bytes_served, "ab", stop=["<user>"], logit_bias={str(number): 100})
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 1
