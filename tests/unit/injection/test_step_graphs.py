"""Steps that a CUDA graph takes, without CUDA: tests/gpu has real ones, which read from the same places."""

import copy
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import megakv
from megakv.attention import device_step
from megakv.injection import step_graphs
from megakv.injection.step_graphs import padded
from tests.unit.injection.replayed import Replayed, attend_step, replayed
from tests.unit.injection.stepped import check_logits, extend_caches, generate, plain_model, prompts

NEW = 9


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Replayed]]:
    with replayed(monkeypatch) as made:
        yield made


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "opt", "gpt_oss", "gpt_neox", "phi3", "gpt_j"])
def test_tokens_are_the_plain_model_s(name: str, graphs: list[Replayed]) -> None:
    model = plain_model(name)
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    for count, rows in enumerate((1, 3, 9)):
        ids, mask = prompts(rows, 30)
        assert torch.equal(generate(engine, ids, mask), generate(model, ids, mask)), rows
        # The prompt is none; of the others the first shows how layers attend, the next computes as graphs do.
        assert [graph.replays for graph in graphs[count:]] == [NEW - 2 - (count == 0)]
        assert engine.report().methods["decode"]["cuda_graph"] > 0
    ids, mask = prompts(2, 20)
    assert torch.equal(generate(engine, ids, mask, num_beams=2), generate(model, ids, mask, num_beams=2))
    engine.destroy()
    assert "forward" not in vars(engine.module.get_decoder())


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_caches_come_and_go(name: str, graphs: list[Replayed]) -> None:
    """One graph serves joint passes of any caches."""
    model = plain_model(name)
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    extend_caches(engine, model)
    assert sum(graph.replays for graph in graphs) > 10
    engine.destroy()


def test_who_listens_hears_every_step_and_changed_weights_are_seen(graphs: list[Replayed]) -> None:
    model = plain_model("llama")
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    ids, mask = prompts(1, 20)
    generate(engine, ids, mask)
    heard, replays = list[int](), graphs[0].replays
    layer = engine.module.get_decoder().layers[1]
    handle = layer.register_forward_hook(lambda *_: heard.append(1))
    generate(engine, ids, mask)
    assert len(heard) == NEW and graphs[0].replays == replays
    handle.remove()
    generate(engine, ids, mask)
    assert len(heard) == NEW and graphs[0].replays > replays
    for one in (model, engine.module):
        linear = one.get_decoder().layers[0].mlp.up_proj
        linear.weight = torch.nn.Parameter(linear.weight.detach() * 1.5, requires_grad=False)
    assert torch.equal(generate(engine, ids, mask), generate(model, ids, mask))
    assert len(graphs) == 2
    engine.destroy()


@pytest.mark.parametrize("name", ["bloom", "llama_dynamic_rope", "deepseek_v3"])
def test_other_models_are_what_they_were(name: str, graphs: list[Replayed]) -> None:
    model = plain_model(name)
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    ids, mask = prompts(2, 30)
    assert torch.equal(generate(engine, ids, mask), generate(model, ids, mask))
    assert not graphs
    engine.destroy()


def test_a_capture_that_fails_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, graphs: list[Replayed]
) -> None:
    @contextmanager
    def refused(graph: Any, **_: Any) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", refused)
    state = torch.cuda.default_generators[0]
    monkeypatch.setattr(torch.cuda, "default_generators", (Restored(state),))
    model = plain_model("llama")
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    for _ in range(2):
        ids, mask = prompts(2, 30)
        assert torch.equal(generate(engine, ids, mask), generate(model, ids, mask))
    assert len(graphs) == 1 and Restored.times == 1
    assert caplog.text.count("not captured in a CUDA graph: operation not permitted when stream is capturing") == 1
    engine.destroy()


class Restored:
    """A generator whose state is put back."""

    times = 0

    def __init__(self, generator: torch.Generator):
        self._generator = generator

    def clone_state(self) -> torch.Generator:
        return self._generator

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        Restored.times += 1


def test_passes_between_others(graphs: list[Replayed]) -> None:
    """Nine streams' steps, padded to sixteen, between prompts whose last layer computes one row."""
    model = plain_model("llama")
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    texts = [[random.randint(3, 190) for _ in range(random.randint(2, 9))] for _ in range(9)]
    streams = [engine.new_cache() for _ in texts]
    for text, cache in zip(texts, streams, strict=True):
        engine.extend([cache], [text])

    for _ in range(2):
        prompt = [random.randint(3, 190) for _ in range(40)]
        check_logits(model, [prompt], engine.extend([engine.new_cache()], [prompt]))
        for _ in range(3):
            new = [[random.randint(3, 190)] for _ in texts]
            for text, own in zip(texts, new, strict=True):
                text += own
            check_logits(model, texts, engine.extend(streams, new))
    assert len(graphs) == 1 and graphs[0].replays >= 4
    engine.destroy()


@pytest.mark.parametrize("change", ["norm", "layers", "scaling", "adapter"])
def test_settings_of_modules_are_seen(change: str, graphs: list[Replayed]) -> None:
    model = plain_model("llama")
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    ids, mask = prompts(1, 20)
    generate(engine, ids, mask)
    for one in (model, engine.module):
        decoder = one.get_decoder()
        if change == "norm":
            decoder.layers[0].input_layernorm.variance_epsilon = 0.5
        elif change == "layers":
            decoder.config.num_hidden_layers = 1
        elif change == "scaling":
            decoder.layers[1].self_attn.scaling *= 1.5
        else:
            decoder.layers[1].mlp.up_proj.active = {"default": [1.5]}
    assert torch.equal(generate(engine, ids, mask), generate(model, ids, mask))
    assert len(graphs) == 2
    engine.destroy()


def test_who_waits_for_the_device_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, graphs: list[Replayed]
) -> None:
    model = plain_model("llama")
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    kind = type(engine.module.get_decoder().layers[0].mlp)
    forward, ids, rows = kind.forward, prompts(9, 20), list[int]()

    def waits(self: Any, x: Tensor) -> Tensor:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        rows.append(x.shape[1])
        return forward(self, x)

    expected = generate(model, *ids)
    monkeypatch.setattr(kind, "forward", waits)
    with pytest.warns(UserWarning, match="something else"):
        assert torch.equal(generate(engine, *ids), expected)
    assert not graphs and caplog.text.count("not captured in a CUDA graph: the host waits for the device") == 1
    # One step that shows how layers attend, three tries, and no padding any more: two layers each.
    assert rows[2:] == [9, 9, *(6 * [16]), *(2 * (NEW - 5) * [9])]
    engine.destroy()


def test_who_goes_by_the_number_of_cached_tokens_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, graphs: list[Replayed]
) -> None:
    model = plain_model("llama")
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    kind = type(model.get_decoder())
    forward, ids = kind.forward, prompts(1, 20)

    def follows(self: Any, *args: Any, **kwargs: Any) -> Any:
        length = kwargs["past_key_values"].get_seq_length()
        output = forward(self, *args, **kwargs)
        if length:
            # As models do that scale what is far into a text.
            output.last_hidden_state = output.last_hidden_state * (1.0 + length / 7 % 1)
            output.last_hidden_state[..., 0] += length
        return output

    monkeypatch.setattr(kind, "forward", follows)
    assert torch.equal(generate(engine, *ids), generate(model, *ids))
    assert not graphs and "it goes by the number of cached tokens" in caplog.text
    engine.destroy()


def test_a_decoder_s_own_forward_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain_model("llama")
    decoder, called = model.get_decoder(), list[int]()
    forward = decoder.forward

    def own(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return forward(*args, **kwargs)

    decoder.forward = own
    runtime = SimpleNamespace(
        comm=SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cuda"), cp_size=1)),
        compressor=None,
        replicas=None,
    )
    monkeypatch.setattr(step_graphs, "attends_on_device", lambda: True)
    assert step_graphs.step_graphs(model, runtime) is None
    del decoder.forward
    monkeypatch.setattr(step_graphs, "StepGraphs", lambda *_, **__: "made")
    assert step_graphs.step_graphs(model, runtime) == "made"


def test_kernels_that_are_wrong_or_cannot_be_made_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, graphs: list[Replayed]
) -> None:
    def broken(*_: Any, **__: Any) -> Tensor:
        raise CompilerError("no C compiler")

    def wrong(*args: Any, **options: Any) -> Tensor:
        return 1.1 * attend_step(*args, **options)

    model = plain_model("llama")
    ids, mask = prompts(2, 20)
    for kernel, said in ((broken, "no C compiler"), (wrong, "differs from the reference")):
        monkeypatch.setattr(device_step, "_kernel", lambda kernel=kernel: kernel)
        device_step._agrees.cache_clear()
        engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
        assert torch.equal(generate(engine, ids, mask), generate(model, ids, mask))
        assert not graphs and said in caplog.text
        engine.destroy()
    device_step._agrees.cache_clear()


class CompilerError(Exception):
    """As Triton's, of no common kind."""


def test_beside_candidates_embeddings_saved_sessions_and_code_that_raises(
    tmp_path: Path, graphs: list[Replayed]
) -> None:
    class Raises(BaseStreamer):
        def put(self, value: Tensor) -> None:
            if graphs:
                raise KeyError("a user's own")

        def end(self) -> None: ...

    model = plain_model("mistral")
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    ids = prompts(1, 40)[0].repeat(1, 2)
    mask, expected = torch.ones_like(ids), generate(model, ids, torch.ones_like(ids), max_new_tokens=40)
    with pytest.raises(KeyError, match="a user's own"):
        generate(engine, ids, mask, streamer=Raises())
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        assert torch.equal(generate(engine, ids, mask, max_new_tokens=40, **options), expected)
    embeds = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
    assert torch.equal(generate(engine, None, mask, **embeds), generate(model, None, mask, **embeds))
    session, new = engine.session(), prompts(1, 5)[0]
    text = torch.cat([session.generate(ids, max_new_tokens=NEW, do_sample=False), new], dim=1)
    session.save(tmp_path / "session")
    for one in (session, engine.restore_session(tmp_path / "session")):
        found = one.generate(new, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(found, generate(model, text, torch.ones_like(text)))
    assert graphs[0].replays > 30
    engine.destroy()


def test_padding() -> None:
    assert [padded(rows) for rows in (1, 8, 9, 64, 65, 256, 257)] == [1, 8, 16, 64, 96, 256, None]
    assert all(np.diff([padded(rows) for rows in range(1, 257)]) >= 0)
