"""Answers by OpenAI's own client: equal to the plain model's, whole or streamed, and what they say of themselves."""

import json
import random
import socket
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from tests.distributed.models import prose
from tests.unit.serving.conftest import MOST_S, NAME, Served, wait_for


def ask(served: Served, text: str, **options: Any) -> Any:
    values = {"model": NAME, "temperature": 0, "max_tokens": 12, **options}
    return served.client().chat.completions.create(messages=[{"role": "user", "content": text}], **values)


def prompt_tokens(served: Served, text: str) -> list[int]:
    return list(served.model.reader.encode_chat([{"role": "user", "content": text}], [], {}))


def test_answers_are_those_of_the_plain_model(served: Served) -> None:
    for _ in range(5):
        text = prose(random.randint(1, 60))
        prompt, count = prompt_tokens(served, text), random.randint(1, 20)
        expected = served.greedy(prompt, count)
        answer = ask(served, text, max_tokens=count)
        choice = answer.choices[0]
        assert choice.message.content == served.model.tokenizer.decode(expected, skip_special_tokens=True)
        assert choice.finish_reason == "stop" if expected[-1] in served.model.end_ids else "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(expected))
        streamed = list(ask(served, text, max_tokens=count, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in streamed if c.choices) == choice.message.content
        assert [c.choices[0].finish_reason for c in streamed if c.choices][-1] == choice.finish_reason
        assert streamed[-1].usage.prompt_tokens == len(prompt) and not streamed[-1].choices
        # All but the last token, whose logits are needed, or whole blocks of them.
        assert streamed[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_completions_take_texts_and_tokens(served: Served) -> None:
    texts = [prose(5), prose(9)]
    prompts = [served.model.tokenizer(text).input_ids for text in texts]
    # They go on in the text of the prompt, with the space between.
    decode = partial(served.model.tokenizer.decode, skip_special_tokens=True)
    expected = [decode(prompt + served.greedy(prompt, 6))[len(decode(prompt)) :] for prompt in prompts]
    create = served.client().completions.create
    options: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 6}
    for given in (texts, prompts):
        answer = create(prompt=given, **options)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, prompts))
    assert create(prompt=prompts[0], **options).choices[0].text == expected[0]
    parts: list[str] = ["", ""]
    for chunk in create(prompt=texts, stream=True, **options):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == expected


def test_stops_end_an_answer_before_them(served: Served) -> None:
    text = prose(20)
    whole = ask(served, text, max_tokens=16, extra_body={"ignore_eos": True}).choices[0].message.content
    for _ in range(5):
        begin = random.randrange(1, len(whole) - 4)
        stop = whole[begin : begin + random.randint(1, 4)]
        options: dict[str, Any] = {"max_tokens": 16, "stop": [stop, "never this"], "extra_body": {"ignore_eos": True}}
        answer = ask(served, text, **options).choices[0]
        assert (answer.message.content, answer.finish_reason) == (whole[: whole.index(stop)], "stop")
        streamed = list(ask(served, text, stream=True, **options))
        assert "".join(c.choices[0].delta.content or "" for c in streamed) == answer.message.content


def test_log_probabilities(served: Served) -> None:
    text = prose(10)
    content = ask(served, text, max_tokens=5, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    for token in content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        # Greedy answers are the likeliest.
        assert token.top_logprobs[0].token == token.token and bytes(token.bytes).decode() == token.token
        assert [each.logprob for each in token.top_logprobs] == sorted(
            (e.logprob for e in token.top_logprobs), reverse=True
        )
    streamed = ask(served, text, max_tokens=5, logprobs=True, top_logprobs=3, stream=True)
    again = [t for c in streamed if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [token.token for token in again] == [token.token for token in content]
    # Whatever the random text makes the model say.
    wanted: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    found = served.client().completions.create(model=NAME, prompt=text, **wanted).choices[0]
    assert found.logprobs is not None and found.logprobs.tokens is not None and found.logprobs.top_logprobs is not None
    assert len(found.logprobs.tokens) == 4 and all(len(top) <= 3 for top in found.logprobs.top_logprobs)
    assert all(name in top for name, top in zip(found.logprobs.tokens, found.logprobs.top_logprobs, strict=True))


def test_several_answers_share_their_prompt(served: Served) -> None:
    text = prose(100)
    before = served.loop.stats()
    answer = ask(served, text, n=4, temperature=1, seed=random.randrange(1 << 40), max_tokens=8)
    after = served.loop.stats()
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == len(prompt_tokens(served, text))
    assert after.computed_tokens - before.computed_tokens < 2 * answer.usage.prompt_tokens
    seed = random.randrange(1 << 40)
    first, second = (ask(served, text, temperature=1, seed=seed, n=2) for _ in range(2))
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]


def test_a_bias_decides(served: Served) -> None:
    token = random.randrange(4, 200)
    answer = ask(served, prose(5), max_tokens=3, logit_bias={str(token): 100})
    assert answer.choices[0].message.content == " ".join([served.model.tokenizer.decode([token])] * 3)


def test_whole_numbers_of_a_generation_config(served: Served) -> None:
    """What a client writes without a decimal point is a number like any other; what is refused says what it is."""
    body = {"generation_config": json.dumps({"repetition_penalty": 2})}
    assert ask(served, prose(5), max_tokens=3, extra_body=body).usage.completion_tokens > 0
    with pytest.raises(openai.BadRequestError, match="top_p") as refused:
        ask(served, prose(5), max_tokens=3, extra_body={"generation_config": json.dumps({"top_p": 1.5})})
    assert refused.value.code == "invalid_value"


def test_responses_go_on_from_earlier_ones(served: Served) -> None:
    client, text = served.client(), prose(30)
    options: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 6}
    first = client.responses.create(input=text, **options)
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": first.output_text}]
    forks = [prose(3), prose(4)]
    for question in forks:
        answer = client.responses.create(input=question, previous_response_id=first.id, **options)
        prompt = list(served.model.reader.encode_chat([*turns, {"role": "user", "content": question}], [], {}))
        expected = served.model.tokenizer.decode(served.greedy(prompt, 6), skip_special_tokens=True)
        assert answer.output_text == expected and answer.usage is not None
        assert answer.usage.input_tokens == len(prompt) and answer.usage.input_tokens_details.cached_tokens > 30
    assert client.responses.retrieve(first.id).output_text == first.output_text
    with client.responses.stream(input=text, **options) as stream:
        text_parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(text_parts) == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="aa", previous_response_id=first.id, **options)
    unkept = client.responses.create(input="aa", store=False, **options)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_progress_of_a_prompt(served: Served) -> None:
    text = prose(200)
    chunks = list(ask(served, text, stream=True, extra_body={"return_progress": True}))
    found = [chunk.prompt_progress for chunk in chunks if getattr(chunk, "prompt_progress", None)]
    assert found and found[-1]["processed"] == found[-1]["total"] == len(prompt_tokens(served, text))
    assert all(each.keys() - {"ranks"} == {"total", "cache", "processed", "time_ms"} for each in found)
    assert found[-1]["ranks"] == [found[-1]["processed"]]


def test_who_leaves_is_not_answered_further(served: Served) -> None:
    body = {"model": NAME, "prompt": prose(5), "max_tokens": 500, "ignore_eos": True, "n": 2}
    for stream in (True, False):
        before = served.loop.stats()
        asked = httpx.Request("POST", f"{served.url}/v1/completions", json={**body, "stream": stream})
        lines = [f"POST {asked.url.path} HTTP/1.1", *(f"{name}: {value}" for name, value in asked.headers.items())]
        with socket.create_connection((asked.url.host, asked.url.port)) as client:
            client.sendall("\r\n".join([*lines, "", ""]).encode() + asked.read())
            wait_for(lambda b=before: served.loop.stats().prompt_tokens > b.prompt_tokens)
        wait_for(lambda: not (served.loop.stats().running or served.loop.stats().waiting))
        # It may have been quick enough to end.
        stats = served.loop.stats()
        assert stats.cancelled > before.cancelled or stats.requests - before.requests == 2


def test_caches_are_compressed_on_request(served: Served, budget: str) -> None:
    """Where there is a budget, beside exact answers; elsewhere the error says what to do."""
    with pytest.raises(openai.BadRequestError, match=r"compress_cache = true.*megakv\.fairkv\.budget"):
        ask(served, prose(40), max_tokens=4, extra_body={"compress_cache": True})
    client = openai.OpenAI(base_url=f"{budget}/v1", api_key="none", max_retries=0, timeout=MOST_S)
    text, said = prose(60), dict[bool, list[str]]()
    for compresses in (True, False, True, False):
        body = {"compress_cache": compresses, "ignore_eos": True}
        found = client.completions.create(model=NAME, prompt=text, max_tokens=9, temperature=0, extra_body=body)
        said.setdefault(compresses, []).append(found.choices[0].text)
        assert found.usage is not None and found.usage.prompt_tokens_details is not None
        # What was read with a compressed cache, or for one, is of no use to others.
        cached = found.usage.prompt_tokens_details.cached_tokens
        assert (cached or 0) == (found.usage.prompt_tokens - 1 if len(said[compresses]) > 1 and not compresses else 0)
    assert len(set(said[True])) == len(set(said[False])) == 1
    assert "megakv_compressed_total 2.0" in httpx.get(f"{budget}/metrics").text


def test_models_health_metrics_and_status(served: Served) -> None:
    assert [model.id for model in served.client().models.list()] == [NAME]
    assert served.client().models.retrieve(NAME).id == NAME
    ask(served, prose(3))
    metrics = httpx.get(f"{served.url}/metrics").text
    for name in (
        "megakv_requests_total",
        "megakv_hit_tokens_total",
        "megakv_proposed_tokens_total",
        "megakv_accepted_tokens_total",
        'megakv_kv_tokens{tier="device"}',
        'megakv_memory_bytes{rank="0"}',
    ):
        assert name in metrics, metrics
    count = [line for line in metrics.splitlines() if line.startswith("megakv_time_to_first_token_seconds_count")]
    assert float(count[0].split()[1]) > 0 and "/v1/chat/completions" in metrics
    status = httpx.get(f"{served.url}/status").json()
    assert status["model"] == NAME and status["documents"] and json.dumps(status)
    page = httpx.get(served.url)
    assert "<script>" in page.text and "script-src 'sha256-" in page.headers["content-security-policy"]
