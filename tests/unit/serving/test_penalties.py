"""Penalties against a slow reference, which counts all tokens anew for every one that comes."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from megakv.serving.penalties import Penalties
from megakv.serving.request import Sampling
from megakv.serving.sampler import Sampler
from tests.distributed.models import prose
from tests.unit.serving.conftest import NAME, Served


def drawn() -> Sampling:
    return Sampling(
        temperature=0,
        presence_penalty=random.choice([0.0, random.uniform(-2, 2)]),
        frequency_penalty=random.choice([0.0, random.uniform(-2, 2)]),
        repetition_penalty=random.choice([1.0, random.uniform(0.5, 2)]),
    )


def slow(scores_V: torch.Tensor, sampling: Sampling, prompt: list[int], answer: list[int]) -> torch.Tensor:
    found = scores_V.clone()
    if sampling.repetition_penalty != 1:
        processor = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
        found = processor(torch.tensor([prompt + answer]), found[None])[0]
    for token, count in Counter(answer).items():
        counted = torch.tensor(count, dtype=torch.float32)
        found[token] -= sampling.presence_penalty + sampling.frequency_penalty * counted
    return found


@pytest.mark.parametrize("attempt", range(6))
def test_scores_are_those_of_counting_anew(attempt: int) -> None:
    """Bit for bit, however many tokens come between two looks."""
    count, sampling = random.choice([7, 300, 2000]), drawn()
    penalties = Penalties(sampling)
    prompt, answer = [random.randrange(count) for _ in range(random.randint(1, 500))], list[int]()
    for _ in range(60):
        for _ in range(random.choice([0, 1, 1, 1, 3])):
            answer.append(random.randrange(count))
            penalties.take(answer[-1], count)
        scores_V = 4 * torch.randn(count)
        scores_V[random.randrange(count)] = -torch.inf
        assert torch.equal(penalties.apply(scores_V, prompt + answer), slow(scores_V, sampling, prompt, answer))


@pytest.mark.parametrize("attempt", range(3))
def test_tokens_are_those_of_counting_anew(attempt: int) -> None:
    sampling, prompt, answer = drawn(), [random.randrange(50) for _ in range(40)], list[int]()
    sampler = Sampler(sampling)
    for _ in range(100):
        logits_V = torch.randn(50)
        expected = int(slow(logits_V, sampling, prompt, answer).argmax())
        token = sampler.next(logits_V, prompt + answer)
        assert token is not None and token.id == expected
        answer.append(token.id)


def test_a_token_costs_the_same_behind_many() -> None:
    """Of those that are there only the new one is looked at."""

    class Watched(list[int]):
        looked_at = 0

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            self.looked_at += len(found) if isinstance(at, slice) else 1
            return found

    sampling = Sampling(temperature=0, presence_penalty=0.3, frequency_penalty=0.1, repetition_penalty=1.2)
    sampler, tokens = Sampler(sampling), Watched(random.randrange(50) for _ in range(5000))
    for _ in range(20):
        token = sampler.next(torch.randn(50), tokens)
        assert token is not None
        tokens.append(token.id)
    assert tokens.looked_at == 5000 + 19


@pytest.mark.parametrize("temperature", [0, 0.2])
def test_answers_are_the_same_with_prompt_lookup_and_beside_each_other(served: Served, temperature: float) -> None:
    """Candidates that do not come do not count."""
    text = prose(12) * 6
    options: Any = {
        "temperature": temperature,
        "seed": 7,
        "max_tokens": 80,
        "presence_penalty": -2,
        "frequency_penalty": -0.5,
    }

    def ask(**more: Any) -> Any:
        extra = {"repetition_penalty": 0.8, "ignore_eos": True, **more.pop("extra", {})}
        return served.client().completions.create(model=NAME, prompt=text, extra_body=extra, **options, **more)

    before = served.loop.stats().accepted_tokens
    plain, looked, several = ask(extra={"prompt_lookup": 0}), ask(), ask(n=2)
    assert served.loop.stats().accepted_tokens > before
    assert plain.choices[0].text == looked.choices[0].text == several.choices[0].text
    other = served.client().completions.create(
        model=NAME,
        prompt=text,
        extra_body={"repetition_penalty": 0.8, "ignore_eos": True},
        **{**options, "seed": 8},
    )
    assert several.choices[1].text == other.choices[0].text
