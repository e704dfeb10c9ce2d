"""Stops and log probabilities go by an answer's content: what is thought or called is none of it."""

import json
import random

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from megakv.serving.http.answer_text import AnswerText
from megakv.serving.http.completions import chat_logprobs, completion_logprobs
from megakv.serving.http.parts import Contents, Detokenizer
from megakv.serving.request import Token
from tests.distributed.models import prose
from tests.unit.serving.conftest import MOST_S, NAME, Served
from tests.unit.serving.test_http_parts import ANSWERS
from tests.unit.serving.tokenizers import KINDS, byte_fallback, byte_level, random_text

WORDS = ["a", "b", "ab", "ä", "漢", "\n", "<", " "]


def letters(most: int) -> str:
    return "".join(random.choices(WORDS, k=random.randint(0, most)))


def drawn() -> tuple[str, list[tuple[int, int]]]:
    """An answer, and where its contents are, one between two calls each."""
    text = f"<think>{letters(9)}</think>" if random.random() < 0.7 else ""
    contents = [(len(text), len(text))]
    for _ in range(random.randint(1, 4)):
        # Blanks before a call would be a part of its mark.
        text += letters(9) + "."
        if random.random() < 0.3:
            text += f"<tool_call>{letters(3)}</tool_call>"
        contents[-1] = (contents[-1][0], len(text))
        if random.random() < 0.5:
            text += '<tool_call>{"name": "f", "arguments": {"ab": "ab"}}</tool_call>'
            contents.append((len(text), len(text)))
    return text, contents


def read(tokenizer: PreTrainedTokenizerFast, text: str, stops: list[str]) -> tuple[str, list[Token], bool]:
    """As of a model that writes it in its tokens."""
    found, tokens = "", list[Token]()
    answer = AnswerText(Detokenizer(tokenizer, special=True), stops, Contents(ANSWERS, "<assistant>", []))
    for number in tokenizer(text, add_special_tokens=False).input_ids:
        more, its = answer.add(Token(number))
        found, tokens = found + more, tokens + its
        if answer.stopped:
            return found, tokens, True
    more, its = answer.end()
    return found + more, tokens + its, answer.stopped


def test_stops_and_tokens_go_by_content_alone() -> None:
    tokenizer = byte_level()
    for _ in range(200):
        text, contents = drawn()
        stop = random.choice(["ab", "a.", "b", "\n", "ä<", "name", "call>", "think", ">"])
        found, tokens, stopped = read(tokenizer, text, [stop])
        places = [at for a, b in contents if (at := text.find(stop, a, b)) >= 0]
        end = min(places, default=len(text))
        assert (found, stopped) == (text[:end], bool(places)), (text, stop)
        expected, ids, begin = [], tokenizer(text, add_special_tokens=False).input_ids, 0
        for n, token in enumerate(ids):
            # Of a character of several tokens each is its text.
            till = len(tokenizer.decode(ids[: n + 1]).rstrip("\ufffd"))
            if any(max(a, begin) < min(b, max(till, begin + 1), end) for a, b in contents):
                expected.append(token)
            begin = till
        assert [token.id for token in tokens] == expected, (text, stop)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_a_template_are_those_of_the_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    for _ in range(20):
        tokens = tokenizer(random_text(40), add_special_tokens=False).input_ids
        answer = AnswerText(Detokenizer(tokenizer), ["never this"])
        found = [answer.add(Token(token)) for token in tokens] + [answer.end()]
        assert [token.id for _, its in found for token in its] == tokens
        assert "".join(text for text, _ in found) == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def test_a_token_has_its_own_first_space() -> None:
    """The one before a text's first word is the tokenizer's, and a decoder takes it away again."""
    tokenizer = byte_fallback()
    ids = tokenizer("ab cd").input_ids
    tokens = [Token(token, -1.0) for token in ids]
    found = completion_logprobs(tokenizer, tokens, 0)
    assert "".join(found.tokens or []) == " ab cd"
    assert found.text_offset == [sum(map(len, (found.tokens or [])[:n])) for n in range(len(ids))]
    assert [bytes(each.bytes or []).decode() for each in chat_logprobs(tokenizer, tokens)] == found.tokens


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_text(stream: bool, served: Served) -> None:
    """Whatever a stop cuts off, and however its pieces come."""
    text = prose(20)
    body = {"model": NAME, "prompt": text, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    whole = httpx.post(f"{served.url}/v1/completions", json=body, timeout=MOST_S).json()["choices"][0]
    begin = random.randrange(2, len(whole["text"]) - 4)
    stop = whole["text"][begin : begin + random.randint(1, 4)]
    answer = httpx.post(f"{served.url}/v1/completions", json={**body, "stop": stop, "stream": stream}, timeout=MOST_S)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ") and "DONE" not in line]
    choices = [json.loads(line)["choices"][0] for line in lines] if stream else answer.json()["choices"]
    said = "".join(choice["text"] for choice in choices)
    assert said == whole["text"][: whole["text"].index(stop)]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"][: len(tokens)]
    # The last one may begin with the end of the text.
    assert len("".join(tokens[:-1])) <= len(said)


def test_a_special_token_is_a_stop_by_its_name(bytes_served: Served) -> None:
    """Though it is no part of the text."""
    tokenizer = bytes_served.model.tokenizer
    token = tokenizer.eos_token_id
    body = {"model": NAME, "prompt": "ab", "max_tokens": 5, "ignore_eos": True, "logit_bias": {str(token): 100}}
    for stop, why in (("<end>", "stop"), ("<end", "length")):
        answer = httpx.post(f"{bytes_served.url}/v1/completions", json={**body, "stop": stop}, timeout=MOST_S).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", why)
