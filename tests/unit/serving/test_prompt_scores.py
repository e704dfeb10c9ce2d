"""Prompts with their own log probabilities, against transformers' logits over the whole of them."""

import random
from typing import Any

import httpx
import pytest
import torch

from megakv.serving import prompt_scores
from megakv.serving.prompt_scores import scored
from tests.distributed.models import prose
from tests.unit.serving.conftest import MOST_S, NAME, Served, check_error


def post(served: Served, **fields: Any) -> Any:
    body = {"model": NAME, "max_tokens": 0, "temperature": 0, **fields}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=MOST_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def of_transformers(served: Served, tokens: list[int]) -> torch.Tensor:
    """``[S - 1, V]`` log probabilities of what comes behind each token but the last."""
    with torch.inference_mode():
        return served.plain(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def drawn(served: Served, count: int) -> list[int]:
    return [random.randrange(len(served.model.tokenizer)) for _ in range(count)]


def check(served: Served, logprobs: Any, tokens: list[int], top: int) -> None:
    """Of a prompt; what stands behind it is left out."""
    expected = of_transformers(served, tokens)
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    own = [float(row[token]) for row, token in zip(expected, tokens[1:], strict=True)]
    count = len(tokens)
    assert logprobs["token_logprobs"][1:count] == pytest.approx(own, abs=2e-4)
    for row, told in zip(expected, logprobs["top_logprobs"][1:count], strict=True):
        # The chosen one is always there; of some tokens the texts are the same.
        assert 0 < len(told) <= top + 1
        assert max(told.values()) == pytest.approx(float(row.max()), abs=2e-4)
    decode = served.model.tokenizer.decode
    assert logprobs["tokens"][:count] == [decode([token], clean_up_tokenization_spaces=False) for token in tokens]


@pytest.mark.parametrize("count", [2, 17, 128, 129, 130, 300])
def test_loglikelihoods_are_those_of_transformers(served: Served, count: int) -> None:
    """As lm-eval asks for them: tokens, an echo, and no answer or one token."""
    tokens = drawn(served, count)
    for most in (0, 1):
        found = post(served, prompt=tokens, echo=True, logprobs=2, max_tokens=most, ignore_eos=True)
        (choice,) = found["choices"]
        assert choice["finish_reason"] == "length" and found["usage"]["completion_tokens"] == most
        assert len(choice["logprobs"]["token_logprobs"]) == count + most
        check(served, choice["logprobs"], tokens, 2)
    # The answer's own is the model's, too.
    behind = of_transformers(served, [*tokens, 0])[-1]
    assert choice["logprobs"]["token_logprobs"][-1] == pytest.approx(float(behind.max()), abs=2e-4)


def test_whatever_is_kept_of_the_prompt(served: Served) -> None:
    """And beside streams of others; several prompts in one call."""
    tokens = [drawn(served, count) for count in (40, 90, 7)]
    for each in tokens:
        post(served, prompt=each, max_tokens=1)
    found = post(served, prompt=tokens, echo=True, logprobs=1, n=2, max_tokens=3, ignore_eos=True)
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    for index, choice in enumerate(found["choices"]):
        check(served, choice["logprobs"], tokens[index // 2], 1)
    assert found["usage"]["completion_tokens"] == 18


def test_the_text_of_the_prompt_comes_first(served: Served) -> None:
    text = prose(20)
    plain = post(served, prompt=text, max_tokens=8, ignore_eos=True)["choices"][0]["text"]
    assert post(served, prompt=text, max_tokens=8, ignore_eos=True, echo=True)["choices"][0]["text"] == text + plain
    assert post(served, prompt=[text, text], echo=True)["choices"][1]["text"] == text
    tokens = list(served.model.reader.encode(text))
    decoded = served.model.tokenizer.decode(tokens, skip_special_tokens=True)
    assert post(served, prompt=tokens, echo=True)["choices"][0]["text"] == decoded


def test_a_stream_begins_with_the_prompt(served: Served) -> None:
    text, options = prose(12), {"max_tokens": 5, "echo": True, "logprobs": 1, "temperature": 0}
    extra = {"ignore_eos": True}
    create = served.client().completions.create
    whole = create(model=NAME, prompt=text, extra_body=extra, **options).choices[0]  # type: ignore[call-overload]
    chunks = list(create(model=NAME, prompt=text, stream=True, extra_body=extra, **options))  # type: ignore[call-overload]
    assert chunks[0].choices[0].text.startswith(text)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    values = [
        value for chunk in chunks if chunk.choices[0].logprobs for value in chunk.choices[0].logprobs.token_logprobs
    ]
    assert values[0] is None and values[1:] == pytest.approx(whole.logprobs.token_logprobs[1:], abs=1e-4)


def test_as_vllm_has_them(served: Served) -> None:
    tokens = drawn(served, 30)
    found = post(served, prompt=tokens, prompt_logprobs=3)["choices"][0]
    first, *told = found["prompt_logprobs"]
    assert first is None and found["text"] == ""
    for row, token, each in zip(of_transformers(served, tokens), tokens[1:], told, strict=True):
        assert each[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=2e-4)
        likeliest = sorted(each.values(), key=lambda value: -value["logprob"])[:3]
        assert [value["logprob"] for value in likeliest] == pytest.approx(row.topk(3).values.tolist(), abs=2e-4)
        assert sorted(value["rank"] for value in likeliest) == [1, 2, 3] and len(each) in (3, 4)


def test_scores_do_not_depend_on_how_many_rows_there_are() -> None:
    logits, tokens = 3 * torch.randn(50, 30), [random.randrange(30) for _ in range(50)]
    told = scored(logits, tokens, 4)
    assert told == tuple(scored(logits[row : row + 1], [token], 4)[0] for row, token in enumerate(tokens))
    expected = logits.log_softmax(-1)
    assert [token.logprob for token in told] == pytest.approx([float(expected[i, t]) for i, t in enumerate(tokens)])
    assert prompt_scores.BLOCK_ROWS < 50


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "compress_cache": True}, "compress_cache"),
        ({"echo": 1}, "echo"),
    ],
)
def test_what_cannot_be_is_said(served: Served, fields: dict[str, Any], says: str) -> None:
    body = {"model": NAME, "prompt": "x y z", "max_tokens": 4, **fields}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=MOST_S)
    assert says in check_error(answer, 400)["message"]
