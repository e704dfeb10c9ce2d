"""Offloaded caches in a server of one rank: pools that just suffice, and stores of what was rounded."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

import megakv
from megakv.serving.loop import ServingLoop
from megakv.serving.request import Event, Finished, Progress, Request, Sampling, Token
from megakv.serving.settings import ServingSettings
from tests.distributed.models import save_model
from tests.unit.serving.conftest import MOST_S

PROMPT, NEW = 300, 40
KIB = 2.0**-20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    return save_model(tmp_path_factory.mktemp("model"), vocab_size=128)


@contextmanager
def served(engine: megakv.MegaKVEngine, **settings: Any) -> Iterator[ServingLoop]:
    loop = ServingLoop(engine, ServingSettings(**{"chunk_tokens": 64, **settings}))
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop.drain()
        thread.join(MOST_S)
    assert not thread.is_alive()


def answers(loop: ServingLoop, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
    """Tokens of all, asked at a time, and how many of each prompt's were there."""
    queues = [Queue[Event]() for _ in prompts]
    for number, (prompt, queue) in enumerate(zip(prompts, queues, strict=True)):
        name = f"{number} of {id(queues)}"
        loop.submit(Request(name, tuple(prompt), NEW, queue.put, sampling=Sampling(temperature=0)))
    found = []
    for queue in queues:
        tokens, cached = list[int](), 0
        while not isinstance(event := queue.get(timeout=MOST_S), Finished):
            if isinstance(event, Token):
                tokens.append(event.id)
            elif isinstance(event, Progress):
                cached = event.cached
        assert event.why == "length", event
        found.append((tokens, cached))
    return found


def engine_of(model: Path, **offload: Any) -> megakv.MegaKVEngine:
    section = {"offload": {"enabled": True, "page_kib": 1, **offload}} if offload else {}
    return megakv.init_inference(str(model), {"dtype": "fp32", "megakv": section})


def expected(engine: megakv.MegaKVEngine, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([list(prompt)])
    output = engine.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    tokens: list[int] = output[0, PROMPT:].tolist()
    return tokens


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("kib", "sequences"), [(320, 1), (1100, 8)])
def test_a_prompt_of_many_has_room_in_a_small_pool(model: Path, kib: int, sequences: int) -> None:
    """Whether one after the other, where what has ended must make room, or all at a time."""
    prompt = torch.randint(3, 128, (PROMPT,)).tolist()
    with engine_of(model, host_gb=kib * KIB) as engine:
        with served(engine, max_sequences=sequences) as loop:
            found = [*answers(loop, [prompt]), *answers(loop, [prompt] * 8)]
            room = loop.stats().kv_capacity["device"]
        assert PROMPT + NEW <= room < 9 * (PROMPT + NEW)
        tokens = expected(engine, prompt)
    assert all(answer == tokens for answer, _ in found)
    assert [cached for _, cached in found] == [0, *[PROMPT - 1] * 8]


def test_a_pool_that_is_too_small_is_named(model: Path) -> None:
    with engine_of(model, host_gb=100 * KIB) as engine:
        for settings, said in (({"max_sequences": 64}, "have room for 0 tokens"), ({"kv_tokens": 10**6}, "1000000")):
            with pytest.raises(ValueError, match=rf"megakv\.offload\.host_gb.*{said}.*lower kv_tokens"):
                ServingLoop(engine, ServingSettings(**{"max_sequences": 1, **settings})).run()


def test_a_store_of_rounded_keys_is_not_read_by_exact_servers(model: Path, tmp_path: Path) -> None:
    prompt = torch.randint(3, 128, (PROMPT,)).tolist()
    with engine_of(model, host_gb=0.01, kv_bits=4) as engine, served(engine, store=tmp_path) as loop:
        answers(loop, [prompt])
    with engine_of(model) as engine:
        with served(engine, store=tmp_path) as loop:
            ((tokens, cached),) = answers(loop, [prompt])
        assert cached == 0 and tokens == expected(engine, prompt)
