"""Sampling against transformers' own generation loop and against probabilities by definition."""

import math
import random
from collections import Counter

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megakv.serving.request import Sampling, Token
from megakv.serving.sampler import Sampler, _among_likeliest, _RunningSums, check_sampling, sample

V = 50
DRAWS = 4000


def frequencies(sampling: Sampling, logits_V: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    sampler = Sampler(sampling)
    counts = Counter(sampler.next(logits_V, tokens).id for _ in range(DRAWS))
    return torch.tensor([counts[token] / DRAWS for token in range(V)])


def drawn_sampling() -> Sampling:
    return Sampling(
        temperature=random.uniform(0.3, 2),
        top_p=random.choice([1.0, random.uniform(0.3, 1)]),
        top_k=random.choice([0, random.randint(1, V)]),
        min_p=random.choice([0.0, random.uniform(0, 0.3)]),
        repetition_penalty=random.choice([1.0, random.uniform(0.5, 2)]),
        seed=random.randrange(1 << 30),
    )


def among_likeliest(probabilities_V: torch.Tensor, sampling: Sampling) -> list[bool]:
    """Of every token."""
    count = len(probabilities_V)
    return _among_likeliest(probabilities_V[None], [0] * count, range(count), [sampling] * count)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("attempt", range(4))
def test_tokens_come_as_often_as_transformers_says(attempt: int) -> None:
    sampling, logits_V = drawn_sampling(), 3 * torch.randn(V)
    tokens = random.choices(range(V), k=9)
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    expected = processors(torch.tensor([tokens]), logits_V[None].clone())[0].softmax(-1)
    found = frequencies(sampling, logits_V, tokens)
    assert (found - expected).abs().max() < 5 * (0.25 / DRAWS) ** 0.5
    assert (found[expected == 0] == 0).all()


@pytest.mark.parametrize("count", [1, 127, 128, 129, 3000])
def test_a_token_is_drawn_where_the_running_sum_exceeds_the_random_number(count: int) -> None:
    probabilities = (4 * torch.randn(count)).softmax(-1)
    probabilities[torch.rand(count) < random.choice([0, 0.5, 0.99])] = 0
    probabilities[random.randrange(count)] += 0.1
    seed = random.randrange(1 << 30)
    numbers, generator = (torch.Generator().manual_seed(seed) for _ in range(2))
    running, ends = _RunningSums(probabilities[None]), probabilities.cumsum(0, dtype=torch.float64)
    for _ in range(200):
        number = torch.rand((), dtype=torch.float64, generator=numbers) * ends[-1]
        (found,) = running.draw([0], [generator])
        assert probabilities[found] > 0
        # Sums in another order differ in their last digits.
        assert ends[found] > number - 1e-12 and (not found or ends[found - 1] <= number + 1e-12)


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_running_sum_are_tokens_too(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(number, dtype=torch.float64))
    for count in (1, 300, 5000):
        probabilities = torch.randn(count).abs()
        first, last = sorted(random.choices(range(count), k=2))
        probabilities[:first] = probabilities[last + 1 :] = 0
        probabilities /= probabilities.sum()
        assert _RunningSums(probabilities[None]).draw([0], [torch.Generator()]) == [last if number else first]


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_the_likeliest_are_those_that_transformers_keeps(scale: float) -> None:
    ids = torch.zeros(1, 0, dtype=torch.long)
    for top_p in (1e-3, 0.5, 0.9, 0.999, random.random()):
        min_p, count = random.choice([0.0, random.random()]), random.choice([1, 7, 500])
        scores_V = scale * torch.randn(count)
        scores_V[torch.rand(count) < 0.2] = -torch.inf
        scores_V[0] = 0.5
        probabilities_V = scores_V.softmax(-1)
        kept = torch.tensor(among_likeliest(probabilities_V, Sampling(top_p=top_p, min_p=min_p)))
        cuts = LogitsProcessorList([TopPLogitsWarper(top_p)])
        if min_p:
            cuts.append(MinPLogitsWarper(min_p))
        expected = cuts(ids, scores_V[None].clone())[0].isfinite()
        # The last of them may be lost to sums in another order.
        assert (kept & (probabilities_V > 0)).logical_xor(expected).sum() <= 1


@pytest.mark.parametrize("top_p", [0.05, 0.35, 0.9])
def test_of_tokens_as_likely_the_first_are_kept(top_p: float) -> None:
    """However they are found."""
    probabilities_V, kept = torch.full((40,), 1 / 40), math.ceil(40 * top_p)
    found = among_likeliest(probabilities_V, Sampling(top_p=top_p, min_p=0.5))
    assert found == [at < kept for at in range(40)]
    sampler = Sampler(Sampling(top_p=top_p))
    assert {sampler.next(torch.zeros(40), []).id for _ in range(2000)} == set(range(kept))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(logit_bias={3: math.inf}),
        Sampling(logit_bias=dict.fromkeys(range(V), -math.inf), top_p=0.5),
        Sampling(temperature=1e300, logit_bias={3: -math.inf}, min_p=0.1),
    ],
)
def test_what_is_asked_for_may_leave_no_numbers(sampling: Sampling) -> None:
    check_sampling(sampling, V)
    sampler = Sampler(sampling)
    assert sampler.next(torch.randn(V), []) is None and "not finite" in sampler.problem


def test_where_few_are_left_they_are_found_without_drawing_for_long() -> None:
    """Of a thousand that are as likely as can be, a thousandth."""
    logits_V, sampler = torch.randn(1000) / 1000, Sampler(Sampling(top_p=1e-3, seed=1))
    assert sampler.next(logits_V, []).id == int(logits_V.argmax())


def test_penalties_and_bias_are_openai_s() -> None:
    logits_V = torch.randn(V)
    sampling = Sampling(temperature=0, presence_penalty=0.7, frequency_penalty=0.4, logit_bias={3: 1.5, 9: -100.0})
    sampler, told = Sampler(sampling), Counter[int]()
    for _ in range(60):
        mine = logits_V.clone()
        for token, count in told.items():
            mine[token] -= 0.7 + 0.4 * count
        mine[3] += 1.5
        mine[9] -= 100
        token = sampler.next(logits_V, [1, 2]).id
        assert token == int(mine.argmax())
        told[token] += 1
    assert 9 not in told


def test_one_seed_gives_one_answer() -> None:
    rows = torch.randn(20, V)
    answers = []
    for seed in (5, 5, 6):
        sampler = Sampler(Sampling(seed=seed))
        answers.append([sampler.next(row, []).id for row in rows])
    assert answers[0] == answers[1] != answers[2]


def test_log_probabilities_are_the_model_s() -> None:
    logits_V = torch.randn(V)
    token = Sampler(Sampling(temperature=0.5, top_k=2), 5).next(logits_V, [])
    logprobs = logits_V.log_softmax(-1)
    assert token.logprob == pytest.approx(float(logprobs[token.id]))
    assert [value for _, value in token.top] == pytest.approx(logprobs.topk(5).values.tolist())
    assert [id for id, _ in token.top] == logprobs.topk(5).indices.tolist()
    assert Sampler(Sampling(temperature=0), 0).next(logits_V, []).top == ()


def test_a_batch_is_sampled_as_each_alone() -> None:
    logits_BV = torch.randn(6, V)
    samplings = [Sampling(temperature=0), Sampling(seed=1), Sampling(temperature=0, logit_bias={1: 50.0})] * 2
    told = sample(logits_BV, [Sampler(each) for each in samplings], [[1]] * 6)
    assert told == [Sampler(each).next(row, [1]) for each, row in zip(samplings, logits_BV, strict=True)]
    assert told[0] == Token(int(logits_BV[0].argmax()))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1e-40), Sampling(temperature=1e-300), Sampling(temperature=0.01, repetition_penalty=1e-3)],
)
def test_no_setting_that_is_allowed_makes_probabilities_that_are_none(sampling: Sampling) -> None:
    logits_V, seen = 30 * torch.randn(V), list(range(0, V, 2))
    check_sampling(sampling, V)
    chosen = Sampler(sampling).next(logits_V, seen).id
    if sampling.repetition_penalty == 1:
        assert chosen == int(logits_V.argmax())


def test_an_answer_whose_logits_are_no_numbers_leaves_the_others_alone() -> None:
    logits_BV = torch.randn(4, V)
    logits_BV[0, 3], logits_BV[2, 5], logits_BV[3] = float("nan"), float("inf"), -float("inf")
    for sampling in (Sampling(temperature=0), Sampling()):
        told = sample(logits_BV, [Sampler(sampling) for _ in range(4)], [[1]] * 4)
        assert [token is None for token in told] == [True, False, True, True]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"seed": 1 << 70}, "seed"),
        ({"logit_bias": {V: 1.0}}, "logit_bias"),
        ({"logit_bias": {0: float("nan")}}, "logit_bias"),
    ],
)
def test_what_cannot_be_sampled_by_is_named(changes: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_sampling(Sampling(**changes), V)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_many_streams_are_those_of_each_by_itself(dtype: torch.dtype) -> None:
    """Whatever they are drawn by, and beside whichever others."""
    for vocabulary, scale in ((1000, 8.0), (383, 0.1), (4097, 2.0)):
        settings = [drawn_sampling() for _ in range(40)]
        settings = [Sampling(**{**vars(each), "repetition_penalty": 1.0}) for each in settings]
        settings[::7] = [Sampling(temperature=0.0)] * len(settings[::7])
        settings[::5] = [Sampling(top_p=0.05, seed=random.randrange(100))] * len(settings[::5])
        together, apart = ([Sampler(each) for each in settings] for _ in range(2))
        for _ in range(3):
            logits = (scale * torch.randn(len(settings), vocabulary)).to(dtype)
            logits[3], logits[8, 5] = torch.nan, torch.inf
            found = sample(logits, together, [[]] * len(settings))
            assert found[3] is None and found[8] is None
            rest = [row for row in range(len(settings)) if row not in (3, 8)]
            assert [found[row] for row in rest] == [apart[row].next(logits[row], []) for row in rest]
