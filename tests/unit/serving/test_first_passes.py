"""A server's first passes: as many as are quick and have room, and nothing is kept of them."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import megakv
from megakv.cache.cache import ShardedCache
from megakv.engine.engine import MegaKVEngine
from megakv.serving.first_passes import LONGEST_S, SEQUENCES, TOKENS, first_passes
from megakv.serving.pass_times import PassSize
from megakv.serving.settings import ServingSettings
from tests.distributed.models import save_model

FIRST = [(1, TOKENS), (1, 1), (1, 1)]
LOOKED_UP = [(1, TOKENS), (1, 17), (1, 17), (1, 17), (1, 2)]
"""Candidates, as many as there may be by default, and one."""


class Watched:
    """An engine that notes which passes it was asked for, may be slow, and may have no memory for long prompts."""

    def __init__(self, engine: MegaKVEngine, seconds: float = 0.0, most: int = 1000):
        self._engine, self._seconds, self._most = engine, seconds, most
        self.passes: list[tuple[int, int]] = []
        self.caches: list[ShardedCache] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def new_cache(self, **options: bool) -> ShardedCache:
        self.caches.append(self._engine.new_cache(**options))
        return self.caches[-1]

    def extend(
        self, caches: Sequence[ShardedCache], tokens: Sequence[Sequence[int]], candidates: Sequence[int] = ()
    ) -> None:
        (length,) = {len(own) for own in tokens}
        self.passes.append((len(caches), length))
        if length > self._most:
            raise RuntimeError(f"not enough memory: {length}")
        self._engine.extend(caches, tokens, candidates=candidates)
        time.sleep(self._seconds)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegaKVEngine]:
    folder = save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=700)
    with megakv.init_inference(str(folder)) as engine:
        yield engine


@pytest.mark.parametrize(
    ("settings", "prompts", "sequences"),
    [
        ({}, [32, 128, 512], SEQUENCES),
        ({"chunk_tokens": 500}, [32, 128], SEQUENCES),
        # What memory has room for, and a sequence of its own.
        ({"kv_tokens": 130}, [32, 128], SEQUENCES),
        ({"kv_tokens": 40}, [32], SEQUENCES),
        ({"kv_tokens": 16}, [], 5),
        ({"max_sequences": 2, "chunk_tokens": 1}, [], 2),
        ({"max_sequences": 1}, [32, 128, 512], 1),
        ({"max_sequences": 1, "prompt_lookup": 0}, [32, 128, 512], 1),
        ({"kv_tokens": 1}, [], 0),
    ],
)
def test_what_is_computed(
    engine: MegaKVEngine,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    prompts: list[int],
    sequences: int,
) -> None:
    monkeypatch.setattr("megakv.serving.first_passes.LONGEST_S", 600.0)
    watched = Watched(engine)
    found = first_passes(watched, ServingSettings(**{"kv_tokens": 10_000, **settings}))
    together = [(sequences, 1)] * 3 if sequences > 1 else []
    looks_up = settings.get("kv_tokens", 10_000) >= TOKENS + 17 and settings.get("prompt_lookup", 16)
    candidates = LOOKED_UP if looks_up else []
    assert watched.passes == [*FIRST, *candidates, *together, *((1, new) for new in prompts)]
    assert all(cache.length == 0 for cache in watched.caches)
    assert found.kv.tokens == settings.get("kv_tokens", 10_000)
    # Twice the longest is trusted, and a token takes some time.
    assert found.times.trusted_prompt == 2 * max(prompts, default=16)
    assert found.times.seconds(PassSize(sequences=1, context=9)) > 0
    if prompts:
        assert found.times.seconds(PassSize().with_prompt(0, 16 * max(prompts))) > 0


def test_a_slow_model_computes_little(engine: MegaKVEngine) -> None:
    watched = Watched(engine, seconds=LONGEST_S / 4)
    first_passes(watched, ServingSettings(kv_tokens=10_000))
    assert watched.passes == FIRST


def test_what_fails_is_left_to_requests(
    engine: MegaKVEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megakv.serving.first_passes.LONGEST_S", 600.0)
    watched = Watched(engine, most=100)
    found = first_passes(watched, ServingSettings(kv_tokens=10_000))
    assert watched.passes[-1] == (1, 128) and "not enough memory: 128" in caplog.text
    assert all(cache.length == 0 for cache in watched.caches) and found.times.trusted_prompt == 64


def test_no_prompt_is_longer_than_the_model_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakv.serving.first_passes.LONGEST_S", 600.0)
    with megakv.init_inference(str(save_model(tmp_path / "model", max_position_embeddings=100))) as engine:
        watched = Watched(engine)
        first_passes(watched, ServingSettings(kv_tokens=10_000, max_sequences=1))
        assert watched.passes == [*FIRST, *LOOKED_UP, (1, 32)]
