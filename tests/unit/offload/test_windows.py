"""Layers with a sliding window bring only what their queries see, whatever becomes of the other tokens."""

import copy
import ctypes
import functools
import gc
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import megakv
from megakv.distributed.sharding import Layout, TokenBlock, TokenTable
from megakv.offload.method import AUTO, METHODS, Split
from megakv.offload.prefetch import OutOfWindow, Windows
from tests.families import CONFIGS, WINDOW
from tests.unit.offload.test_exactness import generate, plain_model, ragged

LONG = {"max_new_tokens": 24, "min_new_tokens": 24}
BEAMS = {"num_beams": 3, "max_new_tokens": 8}
WAYS: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in (*METHODS, AUTO)},
    "groups": {"method": "auto", "num_gpu_batches": 2},
    "weights": {"method": "chunked", "weights": True, "num_gpu_batches": 3},
    "resident": {"method": "chunked", "device_gb": 40_000 / (1 << 30)},
    "disk": {"method": "auto", "host_gb": 12 * 8192 / (1 << 30), "disk_gb": 0.02},
}


def windows_of(model: Any) -> list[int | None]:
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"] * model.config.num_hidden_layers
    return [model.config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def block(columns: list[list[int]]) -> TokenBlock:
    sequence = np.repeat(np.arange(len(columns)), [len(column) for column in columns])
    slots = np.array([slot for column in columns for slot in column], dtype=np.int64)
    return TokenBlock(sequence, slots, slots, len(columns))


@pytest.mark.parametrize("seed", range(60))
def test_unseen_tokens_are_those_that_no_query_sees(seed: int) -> None:
    generator = np.random.default_rng(seed)
    ranks, batch = int(generator.integers(1, 4)), int(generator.integers(1, 4))
    lengths = generator.integers(0, 60, batch)
    few = generator.integers(0, 4, batch) if seed % 2 else np.ones(batch, dtype=np.int64)
    table = TokenTable(ranks, batch)
    news: list[list[int]] = []
    # The slots of a pass are the same ones in all sequences, some of which may have no token there.
    ends = [int(lengths.max()), int((lengths.max() + few).max())]
    for first, last in ((0 * lengths, lengths), (0 * lengths + ends[0], ends[0] + few)):
        owners = [generator.integers(0, ranks, end - begin) for begin, end in zip(first, last, strict=True)]
        blocks = [
            block([(begin + np.flatnonzero(own == rank)).tolist() for begin, own in zip(first, owners, strict=True)])
            for rank in range(ranks)
        ]
        table.extend(Layout(tuple(blocks), tuple(blocks), replicated=False))
        news = [np.diff(each.bounds).tolist() for each in blocks]
    windows: Windows = [None] * 3
    for layer, window in enumerate((None, int(generator.integers(1, 12)), int(generator.integers(1, 50)))):
        windows[layer] = window
    for rank in range(ranks):
        out_of_window = OutOfWindow(windows, table, rank, news)
        for beyond in (False, True):
            found = [out_of_window.in_layer(layer, beyond=beyond) for layer in range(3)]
            assert found[0] == [0] * batch
            assert out_of_window.in_the_mean(beyond=beyond) == [sum(each) // 3 for each in zip(*found, strict=True)]
            for layer in (1, 2):
                window = windows[layer]
                assert window is not None
                for sequence in range(batch):
                    end = ends[beyond]
                    cached = [int(slot) for slot in table.slots(rank, sequence) if slot < end]
                    # The first query's slot is the one behind all that is cached.
                    assert found[layer][sequence] == sum(slot <= end - window for slot in cached)


def test_a_layer_has_its_part_of_the_mean() -> None:
    mean = Split(100, recomputed=30, on_host=50, resident=10)
    assert mean.of_tokens(200) == Split(200, recomputed=60, on_host=100, resident=20)
    assert mean.of_tokens(0) == Split(0) == Split(0).of_tokens(0)
    assert Split(0).of_tokens(7).streamed == 7


@functools.cache
def answered(name: str) -> tuple[Any, list[torch.Tensor]]:
    """A plain model and what it generates."""
    model = plain_model(name)
    return model, [generate(model, *ragged(3, 70), **options) for options in (LONG, BEAMS)]


def ways() -> Iterator[Any]:
    """Every way with a family drawn: windows in all layers, or in some, soft caps, sinks."""
    for name in ("mistral", "gemma3", "gemma2", "gpt_oss", "starcoder2"):
        for way in WAYS:
            yield pytest.param(name, way, id=f"{name}-{way}", marks=pytest.mark.drawn(1, way))


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize(("name", "way"), ways())
def test_tokens_are_the_plain_model_s(name: str, way: str, offloaded: Callable[..., Any], tmp_path: Any) -> None:
    model, expected = answered(name)
    engine = offloaded(copy.deepcopy(model), **({"disk_path": str(tmp_path)} | WAYS[way]))
    for options, wanted in zip((LONG, BEAMS), expected, strict=True):
        assert torch.equal(generate(engine, *ragged(3, 70), **options), wanted)
        step = engine._offloader.steps[-1].report()
        assert 0 < step.out_of_window < step.cached and step.streamed >= 0
        parts = (step.resident, step.recomputed, step.on_host, step.streamed, step.out_of_window)
        assert sum(parts) == step.cached
        # It keeps to its parts in layers that see more, and in those that see less.
        assert way != "cpu_rank" or step.on_host and not step.recomputed


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_only_what_is_seen_is_sent(name: str, offloaded: Callable[..., Any]) -> None:
    model = plain_model(name)
    ids = torch.randint(3, 190, (2, 90), generator=torch.Generator().manual_seed(5))
    engine = offloaded(copy.deepcopy(model), method="stream")
    generate(engine, ids, torch.ones_like(ids), **LONG)
    row = engine._offloader.rates.row_bytes
    steps = engine._offloader.steps[2:-1]
    # In a step, the first layers of the next one are brought, which see one token more.
    for step in steps:
        cached = step.cached // 2
        seen = [min(cached, cached if window is None else window - 1) for window in windows_of(model)]
        ahead = sum(window is None for window in windows_of(model)[:2])
        assert step.bytes_in == 2 * row * (sum(seen) + ahead)
        assert step.report().out_of_window == round(2 * (len(seen) * cached - sum(seen)) / len(seen))


@pytest.mark.drawn(2)
@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("method", ["stream", "chunked", "cpu_rank"])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_turns_cuts_and_forks_see_what_comes_back_into_the_window(
    name: str, method: str, offloaded: Callable[..., Any], tmp_path: Any
) -> None:
    model = plain_model(name)
    generator = torch.Generator().manual_seed(11)
    turns = [torch.randint(3, 190, (2, length), generator=generator) for length in (2 * WINDOW, 1, WINDOW + 9, 3)]
    engine = offloaded(copy.deepcopy(model), method=method)
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}

    def expected(history: torch.Tensor) -> torch.Tensor:
        return generate(model, history, torch.ones_like(history), max_new_tokens=9, min_new_tokens=9)

    session, history = engine.session(), torch.empty(2, 0, dtype=torch.int64)
    for turn in turns:
        history = torch.cat([history, turn], dim=1)
        found = session.generate(turn, **options)
        assert torch.equal(found, expected(history))
        history = found
    session.save(tmp_path / "saved")
    fork, restored = session.fork(), engine.restore_session(tmp_path / "saved")
    for length in (2 * WINDOW + 3, 5):
        session.cut_back(length)
        cut = torch.cat([history[:, :length], turns[2]], dim=1)
        assert torch.equal(session.generate(turns[2], **options), expected(cut))
    longer = torch.cat([history, turns[1]], dim=1)
    for each in (fork, restored):
        assert torch.equal(each.generate(turns[1], **options), expected(longer))


def resident_bytes() -> int:
    """Of this process, without what it has freed and the allocator keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_the_process_is_no_larger_than_the_window(alone: None) -> None:
    config = CONFIGS["mistral"]()
    config.update({"num_hidden_layers": 6, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 512})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    engine = megakv.init_inference(model, {"dtype": "fp32"})
    ids = torch.randint(3, 190, (1, 3000), generator=torch.Generator().manual_seed(7))
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    # The first one also brings in code, and buffers that stay.
    engine.generate(ids, **options)
    session, before = engine.session(), resident_bytes()
    session.generate(ids, **options)
    window = 6 * 512 * 2 * 8 * 128 * 4
    held = session._cache.nbytes()
    # All tokens would be six times the window.
    assert held <= 1.05 * window and resident_bytes() - before <= held + 0.5 * window
    engine.destroy()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("offload", [None, {}, {"host_gb": 0.0002, "disk_gb": 0.01}], ids=["device", "host", "disk"])
def test_memory_is_that_of_the_window(offload: Any, offloaded: Callable[..., Any], tmp_path: Any, alone: None) -> None:
    """However long the prompt and the answer; and what was left behind is read anew where a cut brings it back."""
    model, window = plain_model("mistral"), 128
    model.config.sliding_window = window
    if offload is None:
        engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    else:
        engine = offloaded(copy.deepcopy(model), disk_path=str(tmp_path), page_kib=4, method="stream", **offload)
    options = {"max_new_tokens": 300, "min_new_tokens": 300, "do_sample": False, "pad_token_id": 0}
    ids = torch.randint(3, 190, (2, 500), generator=torch.Generator().manual_seed(7))
    session, largest = engine.session(), 0

    def look(_ids: Any, _scores: Any) -> Any:
        nonlocal largest
        largest = max(largest, session._cache.nbytes())
        return torch.zeros(2, dtype=torch.bool)

    found = session.generate(ids, stopping_criteria=[look], **options)
    assert torch.equal(found, generate(model, ids, torch.ones_like(ids), max_new_tokens=300, min_new_tokens=300))
    sizes = model.config
    row = 2 * sizes.num_key_value_heads * sizes.head_dim * 4
    pages = 0 if offload is None else 2 * 2 * sizes.num_hidden_layers * 2 * 4096
    assert 0 < largest <= 1.05 * 2 * sizes.num_hidden_layers * window * row + pages
    if offload is not None:
        assert sum(engine._offloader.pool.used().values()) == session._cache.nbytes()
    fork, short = session.fork(), {**options, "max_new_tokens": 5, "min_new_tokens": 5}
    session.save(tmp_path / "saved")
    restored = engine.restore_session(tmp_path / "saved")
    assert restored._cache.gone == session._cache.gone and all(session._cache.gone)
    for each, slots in ((session, 798), (session, 400), (fork, 799), (restored, 610)):
        each.cut_back(slots)
        assert each.length == (slots if slots >= 798 else 0)
        longer = torch.cat([each.input_ids, ids[:, :3]], dim=1)
        expected = generate(model, longer, torch.ones_like(longer), max_new_tokens=5, min_new_tokens=5)
        assert torch.equal(each.generate(ids[:, :3], **short), expected)
    if offload is None:
        engine.destroy()
