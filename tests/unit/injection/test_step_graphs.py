"""Steps that a CUDA graph takes, without CUDA: a graph is a call that is made again, and kernels are PyTorch's.

What the kernels read lies at the same places as for real ones, which tests/gpu has.
"""

import copy
import ctypes
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import megakv
from megakv.attention import device_step, tiles
from megakv.attention.merge import add_sinks
from megakv.attention.reference import dense_attention
from megakv.forward_pass import Pauses
from megakv.injection import hooks, step_graphs, token_layers
from megakv.injection.step_graphs import StepGraphs, padded
from tests.families import FAMILIES

NEW = 9


def rows_at(address: int, heads: int, tokens: int, dim: int, head: int, step: int, dtype: torch.dtype) -> Tensor:
    """``[K, n, D]`` that lie somewhere."""
    extent = (heads - 1) * head + (tokens - 1) * step + dim
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided((heads, tokens, dim), (head, step, 1))


def attend_step(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bounds: Tensor, skips: Tensor, runs: Tensor,
    *, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `megakv.attention.triton_step.attend_step`."""
    (_, heads, rows, dim), kv_heads, value_dim = q.shape, k.shape[1], v.shape[3]
    out = q.new_zeros(1, rows, heads, value_dim)
    words = runs.reshape(-1)
    table = words[: len(words) // 7 * 7].view(-1, 7).tolist()
    for row in range(rows):
        own = table[bounds[row] : bounds[row + 1]]
        if not own:
            continue
        pairs = [
            (
                rows_at(run[0], kv_heads, run[2], dim, run[3], run[4], q.dtype),
                rows_at(run[1], kv_heads, run[2], value_dim, run[5], run[6], q.dtype),
            )
            for run in own
        ]
        for place, new in zip(pairs[-1], (k, v), strict=True):
            place[:, -1] = new[0, :, row]
        keys, values = (torch.cat(each, dim=1)[:, int(skips[row]) :] for each in zip(*pairs, strict=True))
        one, lse = dense_attention(q[0, :, row, None], keys, values, scale, softcap=softcap)
        out[0, row] = (one if sinks is None else add_sinks(one, lse, sinks))[:, 0].to(q.dtype)
    return out


class Replayed:
    """In the place of `torch.cuda.CUDAGraph`."""

    made: list["Replayed"] = []

    def __init__(self) -> None:
        self.again: Any = None
        self.replays = 0
        Replayed.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        self.again()


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Replayed]]:
    Replayed.made = []
    computed = step_graphs.StepGraph._computed
    under_way: list[Any] = [None, None]
    capturing: list[Replayed] = []
    modes: list[Any] = []

    @contextmanager
    def capture(graph: Replayed, **_: Any) -> Iterator[None]:
        capturing.append(graph)
        yield
        capturing.pop()

    def recorded(self: Any, step: Any, inputs: dict[str, Any], cache: Any = None) -> Any:
        output = computed(self, step, inputs, cache)
        if capturing:

            def again() -> None:
                # What is captured has no pass of its own.
                found = computed(self, under_way[0], inputs)
                for name, value in found.items():
                    output[name].copy_(value)

            capturing[-1].again = again
        return output

    run = step_graphs.StepGraph.run

    def begun(self: Any, step: Any, *args: Any) -> Any:
        under_way[0] = step
        return run(self, step, *args)

    monkeypatch.setattr(step_graphs.StepGraph, "_computed", recorded)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(step_graphs.StepGraph, "run", begun)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(tiles, "_shared_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(device_step, "_kernel", lambda: attend_step)
    monkeypatch.setattr(hooks, "step_graphs", StepGraphs)
    # A processor's own way through layers.
    monkeypatch.setattr(token_layers, "load_layer", lambda: (None, ""))
    monkeypatch.setattr("megakv.runtime.load_step", lambda: (None, ""))
    yield Replayed.made
    assert modes[1::2] == [0] * (len(modes) // 2)


def plain_model(name: str) -> Any:
    torch.manual_seed(0)
    config = FAMILIES[name]()
    if name in ("mistral", "gemma2", "gpt_oss"):
        # Head dims of the others are multiples of 8 as they are.
        config.head_dim = 16
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def prompts(rows: int, length: int) -> tuple[Tensor, Tensor]:
    ids, mask = torch.randint(3, 190, (rows, length)), torch.ones(rows, length, dtype=torch.int64)
    for row in range(1, rows):
        mask[row, : random.randint(0, length - 1)] = 0
    return ids.masked_fill(mask == 0, 0), mask


def generate(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    defaults = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **{**defaults, **options})


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
    """One graph serves joint passes of any caches: what each gives alone."""
    model = plain_model(name)
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    texts, caches = list[list[int]](), list[Any]()
    for turn in range(50):
        if len(caches) < 2 or (turn % 5 == 0 and len(caches) < 11):
            text, cache = [random.randint(3, 190) for _ in range(random.randint(1, 50))], engine.new_cache()
            new = [text]
            if caches and turn % 2:
                source = random.randrange(len(caches))
                cache, text = caches[source].fork(), [*texts[source], *text]
            caches.append(cache)
            texts.append(text)
            some = [len(caches) - 1]
        else:
            some = random.sample(range(len(caches)), random.randint(1, len(caches)))
            new = [[random.randint(3, 190)] for _ in some]
            for index, own in zip(some, new, strict=True):
                texts[index] = texts[index] + own
        logits = engine.extend([caches[index] for index in some], new)
        for index, found in zip(some, logits, strict=True):
            with torch.no_grad():
                wanted = model(torch.tensor([texts[index]])).logits[0, -1]
            assert float((found - wanted).norm() / wanted.norm()) < 1e-4, (turn, index)
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


def test_passes_within_others(graphs: list[Replayed]) -> None:
    """Nine streams' steps, padded to sixteen, within a prompt whose last layer computes one row."""
    model = plain_model("llama")
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    texts = [[random.randint(3, 190) for _ in range(random.randint(2, 9))] for _ in range(9)]
    streams = [engine.new_cache() for _ in texts]
    for text, cache in zip(texts, streams, strict=True):
        engine.extend([cache], [text])

    def run(stop: int, moments: list[float]) -> int:
        new = [[random.randint(3, 190)] for _ in texts]
        for text, own in zip(texts, new, strict=True):
            text += own
        check(engine.extend(streams, new), texts)
        return stop + 1

    def check(logits: Tensor, texts: list[list[int]]) -> None:
        for text, found in zip(texts, logits, strict=True):
            with torch.no_grad():
                wanted = model(torch.tensor([text])).logits[0, -1]
            assert float((found - wanted).norm() / wanted.norm()) < 1e-4

    for _ in range(2):
        prompt = [random.randint(3, 190) for _ in range(40)]
        check(engine.extend([engine.new_cache()], [prompt], pauses=Pauses(0, run)), [prompt])
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
    forward, ids = kind.forward, prompts(9, 20)

    def waits(self: Any, x: Tensor) -> Tensor:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        # Without a graph there is no padding.
        assert x.shape[1] in (16, *range(9, 300))
        return forward(self, x)

    expected = generate(model, *ids)
    monkeypatch.setattr(kind, "forward", waits)
    with pytest.warns(UserWarning, match="something else"):
        assert torch.equal(generate(engine, *ids), expected)
    assert not graphs and caplog.text.count("not captured in a CUDA graph: the host waits for the device") == 1
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
    assert step_graphs.step_graphs(model, runtime, None) is None
    del decoder.forward
    monkeypatch.setattr(step_graphs, "StepGraphs", lambda *_: "made")
    assert step_graphs.step_graphs(model, runtime, None) == "made"


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


def test_padding() -> None:
    assert [padded(rows) for rows in (1, 8, 9, 64, 65, 256, 257)] == [1, 8, 16, 64, 96, 256, None]
    assert all(np.diff([padded(rows) for rows in range(1, 257)]) >= 0)
