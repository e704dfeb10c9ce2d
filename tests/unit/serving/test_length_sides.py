"""Models whose rotary frequencies follow the length, in a server: each answer is the plain model's alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import megakv
from megakv.costmodel.config_sizes import positions
from megakv.injection.policy import rope_sides
from megakv.serving.loop import ServingLoop
from megakv.serving.request import Event, Finished, Progress, Request, Sampling, Token
from tests.families import llama, llama_dynamic_rope, phi3_longrope
from tests.unit.serving.conftest import MOST_S
from tests.unit.serving.test_offloaded import served as served_in_chunks

ORIGINAL = 64
NEW = 12


def llama_longrope() -> PreTrainedConfig:
    """No family's own `generate` reads all again here: keys of before the original length stay what they were."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.05, 1.1, 1.2],
        "long_factor": [1.0, 1.5, 3.0, 8.0],
        "original_max_position_embeddings": ORIGINAL,
    }
    return llama(rope_parameters=rope)


CONFIGS = (llama_longrope, phi3_longrope, llama_dynamic_rope)


def served(engine: megakv.MegaKVEngine, **settings: Any) -> AbstractContextManager[ServingLoop]:
    return served_in_chunks(engine, chunk_tokens=24, **settings)


def ask(loop: ServingLoop, prompts: Sequence[Sequence[int]], **options: Any) -> list[tuple[list[int], int]]:
    """Tokens of all, asked at a time, and how many of each prompt's were there."""
    queues = [Queue[Event]() for _ in prompts]
    for number, (prompt, queue) in enumerate(zip(prompts, queues, strict=True)):
        name, sampling = f"{number} of {id(queues)}", Sampling(temperature=0)
        priority = number if options.get("preempts") else 0
        loop.submit(Request(name, tuple(prompt), NEW, queue.put, sampling=sampling, priority=priority))
    found = []
    for queue in queues:
        tokens, cached = list[int](), 0
        while not isinstance(event := queue.get(timeout=MOST_S), Finished):
            if isinstance(event, Token):
                tokens.append(event.id)
            elif isinstance(event, Progress):
                cached = max(cached, event.cached)
        assert event.why == "length", event
        found.append((tokens, cached))
    return found


def alone_answers(plain: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What the plain model says, a new one for each: some remember the longest sequence."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    models = (copy.deepcopy(plain) for _ in prompts)
    return [
        model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        for model, prompt in zip(models, prompts, strict=True)
    ]


@pytest.mark.parametrize("make", CONFIGS)
def test_sequences_of_both_sides_do_not_change_one_another(
    make: Callable[[], PreTrainedConfig], alone: None, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_config(make(), dtype=torch.float32).eval()
    plain.save_pretrained(tmp_path / "model")
    document = torch.randint(3, 100, (150,)).tolist()
    # Within, up to the original length and over it, exactly, beyond, and what begins alike.
    prompts = [document[:length] for length in (20, 40, 58, 64, 65, 90, 91, 150)]
    prompts += [[*document[:30], *torch.randint(3, 100, (extra,)).tolist()] for extra in (5, 40, 80)]
    wanted = alone_answers(plain, prompts)
    with megakv.init_inference(str(tmp_path / "model"), {"dtype": "fp32"}) as engine:
        settings = {"store": tmp_path / "store", "host_kv_tokens": 64}
        with served(engine, **settings) as loop:
            for _ in range(2):
                found = ask(loop, prompts)
                assert [tokens for tokens, _ in found] == wanted
            # What is asked again is there, on its side; of dynamic ones not beyond the original length.
            for prompt, (_, cached) in zip(prompts, found, strict=True):
                kept = len(prompt) <= ORIGINAL or make is not llama_dynamic_rope
                assert (cached >= len(prompt) - 1 - (len(prompt) > ORIGINAL)) if kept else not cached
            assert all(max(each.beginning) < 200 for each in loop.documents())
        with served(engine, **settings) as loop:
            # From the folder, all at a time with room for few.
            assert [tokens for tokens, _ in ask(loop, prompts[::-1])] == wanted[::-1]
        with served(engine, kv_tokens=200, max_sequences=3) as loop:
            assert [tokens for tokens, _ in ask(loop, prompts, preempts=True)] == wanted


def test_offloaded_caches_go_by_their_lengths_too(alone: None, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_config(llama_longrope(), dtype=torch.float32).eval()
    plain.save_pretrained(tmp_path)
    prompts = [torch.randint(3, 100, (length,)).tolist() for length in (58, 90)]
    section = {"offload": {"enabled": True, "host_gb": 0.5, "page_kib": 4}}
    with (
        megakv.init_inference(str(tmp_path), {"dtype": "fp32", "megakv": section}) as engine,
        served(engine) as loop,
    ):
        assert [tokens for tokens, _ in ask(loop, prompts)] == alone_answers(plain, prompts)


def test_sides_are_those_of_the_config() -> None:
    sides = {make: rope_sides(AutoModelForCausalLM.from_config(make())) for make in (*CONFIGS, llama)}
    assert sides[llama] is None
    longrope, phi3, dynamic = (sides[make] for make in CONFIGS)
    assert longrope is not None and [longrope.of(length) for length in (1, 64, 65, 900)] == [0, 0, 65, 65]
    assert phi3 is not None and phi3.restarts and not longrope.restarts
    assert dynamic is not None and [dynamic.of(length) for length in (64, 65, 900)] == [0, 65, 900]


def test_dynamic_frequencies_reach_beyond_the_original_length() -> None:
    """What a server takes is the stretched length: the config names the one before."""
    config = llama_dynamic_rope()
    factor = config.rope_parameters["factor"]
    assert positions(config) == factor * config.max_position_embeddings > config.max_position_embeddings
    assert positions(llama_longrope()) == llama_longrope().max_position_embeddings
