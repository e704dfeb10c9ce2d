"""Decoding in CUDA graphs: the tokens of the plain model, whatever goes on between steps; and its kernels."""

import copy
import logging
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megakv
from megakv.attention.compiled import Run
from megakv.attention.merge import add_sinks
from megakv.attention.reference import dense_attention
from megakv.engine.config import load_config
from megakv.injection.step_graphs import StepGraphs, padded
from tests.unit.injection import stepped

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CAPTURED = ("llama", "llama_mqa", "qwen2", "qwen3", "mistral", "gemma2", "opt", "gpt_neox", "phi3", "cohere", "gpt_j")
OTHERS = ("mixtral", "gpt_oss", "bloom", "llama_dynamic_rope", "deepseek_v3", "falcon_alibi")
"""With experts, ALiBi, latents, or frequencies that follow the length: captured or not, tokens are right."""
NEW = 24


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank."""
    torch.backends.cuda.matmul.allow_tf32 = False
    store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


plain_model, prompts = (partial(each, device="cuda") for each in (stepped.plain_model, stepped.prompts))
generate = partial(stepped.generate, max_new_tokens=NEW)


def captured(engine: Any) -> set[int]:
    """Of how many sequences there are graphs."""
    kernels = [kernel for kernel in engine._hooks._kernels if isinstance(kernel, StepGraphs)]
    return {size for graphs in kernels for size, one in graphs._steps.items() if one.captured}


@pytest.mark.parametrize("name", [*CAPTURED, *OTHERS])
def test_tokens_are_the_plain_model_s(name: str) -> None:
    model = plain_model(name)
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    for rows in (1, 3, 9, 3):
        ids, mask = prompts(rows, 45)
        assert torch.equal(generate(engine, ids, mask), generate(model, ids, mask)), rows
        if name in CAPTURED:
            assert padded(rows) in captured(engine)
    ids, mask = prompts(2, 30)
    assert torch.equal(generate(engine, ids, mask, num_beams=3), generate(model, ids, mask, num_beams=3))
    if name in CAPTURED:
        # Its last call was one of beams.
        generate(engine, ids, mask)
        counts = engine.report().methods["decode"]
        assert counts["cuda_graph"] > 0.8 * sum(counts.values())
    engine.destroy()
    assert "forward" not in vars(engine.module.get_decoder())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_that_of_other_kernels(dtype: torch.dtype) -> None:
    """Logits of forced tokens, step by step, against float64: as far off as the plain model's."""
    model = plain_model("llama")
    ids, mask = prompts(1, 200)
    exact = copy.deepcopy(model).double()(ids).logits[0]
    half = copy.deepcopy(model).to(dtype)
    plain = float((half(ids).logits[0, 99:].double() - exact[99:]).norm() / exact[99:].norm())
    for graph in (True, False):
        config = {"dtype": {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype], "enable_cuda_graph": graph}
        engine = megakv.init_inference(copy.deepcopy(half), config)
        cache, found = engine.new_cache(), []
        found.append(engine.extend([cache], [ids[0, :100]]))
        found += [engine.extend([cache], [ids[0, slot : slot + 1]]) for slot in range(100, 200)]
        error = float((torch.cat(found).double() - exact[99:]).norm() / exact[99:].norm())
        assert bool(captured(engine)) == graph and error <= 1.25 * plain, (graph, error, plain)
        engine.destroy()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_caches_come_and_go(name: str) -> None:
    model = plain_model(name)
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    stepped.extend_caches(engine, model)
    assert len(captured(engine)) > 2
    engine.destroy()


def test_a_session_s_turns_and_a_change_of_weights() -> None:
    model = plain_model("qwen3")
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    session, text = engine.session(), torch.empty(1, 0, dtype=torch.int64, device="cuda")
    for length in (40, 7, 1):
        new = prompts(1, length)[0]
        text = torch.cat([text, new], dim=1)
        text = generate(model, text, torch.ones_like(text))
        assert torch.equal(session.generate(new, max_new_tokens=NEW, do_sample=False, pad_token_id=0), text)
    # Weights in other memory are seen, and whoever listens is told of every step.
    for one in (model, engine.module):
        linear = one.get_decoder().layers[0].mlp.up_proj
        linear.weight = torch.nn.Parameter(linear.weight.detach() * 1.5, requires_grad=False)
    ids, mask = prompts(1, 20)
    expected, heard = generate(model, ids, mask), list[int]()
    assert torch.equal(generate(engine, ids, mask), expected) and captured(engine)
    layer = engine.module.get_decoder().layers[1]
    handle = layer.register_forward_hook(lambda *_: heard.append(1))
    assert torch.equal(generate(engine, ids, mask), expected) and len(heard) == NEW
    handle.remove()
    assert torch.equal(generate(engine, ids, mask), expected) and len(heard) == NEW
    engine.destroy()


def test_what_cannot_be_captured_is_computed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = plain_model("llama")
    ids, mask = prompts(2, 20)
    expected = generate(model, ids, mask)
    engine = megakv.init_inference(copy.deepcopy(model), {"dtype": "fp32"})
    kind = type(engine.module.get_decoder().layers[0].mlp)
    forward = kind.forward

    def waits(self: Any, x: Tensor) -> Tensor:
        assert float(x.sum()) == float(x.sum())
        return forward(self, x)

    monkeypatch.setattr(kind, "forward", waits)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(generate(engine, ids, mask), expected)
    assert "not captured in a CUDA graph" in caplog.text and not captured(engine)
    assert torch.equal(generate(engine, ids, mask), expected)
    # Neither do random numbers of the device notice.
    torch.randn(1, device="cuda")
    engine.destroy()


def test_it_can_be_switched_off() -> None:
    model = plain_model("llama")
    engine = megakv.init_inference(model, {"dtype": "fp32", "enable_cuda_graph": False})
    ids, mask = prompts(1, 20)
    generate(engine, ids, mask)
    assert not captured(engine)
    engine.destroy()
    with pytest.raises(ValueError, match="enable_cuda_graph = true: messages between context-parallel ranks"):
        load_config({"enable_cuda_graph": True, "megakv": {"context_parallel": {"size": 2}}})


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("lengths", [[1], [5000], [70, 0, 1, 300, 640], [33] * 40])
@pytest.mark.parametrize(("heads", "kv_heads", "dims"), [(32, 8, (128, 128)), (9, 3, (64, 64)), (4, 4, (80, 48))])
@pytest.mark.parametrize("options", [{}, {"window": 50, "sinks": True}, {"softcap": 2.0}], ids=str)
def test_kernels_against_the_reference(
    dtype: torch.dtype, lengths: list[int], heads: int, kv_heads: int, dims: tuple[int, int], options: dict[str, Any]
) -> None:
    from megakv.attention.triton_step import attend_step

    window, softcap = options.get("window"), options.get("softcap")
    bounds, skips, runs, held = [0], list[int](), list[Run](), list[tuple[Tensor, Tensor] | None]()
    memory = list[Tensor]()
    for length in lengths:
        rows = [torch.randn(kv_heads, length, dim, device="cuda").to(dtype) for dim in dims]
        cuts = sorted({0, length, *(random.randint(0, max(0, length - 1)) for _ in range(2))})
        for first, last in zip(cuts, cuts[1:], strict=False):
            own = [torch.zeros(kv_heads, last - first + 3, dim, device="cuda", dtype=dtype) for dim in dims]
            for place, each in zip(own, rows, strict=True):
                # The new row's place has anything in it.
                place[:, : last - first] = each[:, first:last]
                place[:, last - first - 1 if last == length else last - first :] = 7.0
            memory += own
            runs.append(Run.of(*(each[:, : last - first] for each in own)))
        bounds.append(len(runs))
        skips.append(0 if window is None else max(0, length - window))
        held.append((rows[0], rows[1]) if length else None)
    sinks = torch.randn(heads, device="cuda").to(dtype) if options.get("sinks") else None
    q = torch.randn(len(lengths), heads, dims[0], device="cuda").to(dtype).transpose(0, 1)[None]
    new = [
        torch.stack([q.new_zeros(kv_heads, dim) if pair is None else pair[kind][:, -1] for pair in held], 1)[None]
        for kind, dim in enumerate(dims)
    ]
    tables = (torch.tensor(each, device="cuda") for each in (bounds, skips, [list(run) for run in runs]))
    out = attend_step(q, *new, 0.2, *tables, softcap=softcap, sinks=sinks)
    for row, pair in enumerate(held):
        if pair is None:
            assert not out[0, row].any()
            continue
        keys, values = (each[:, skips[row] :] for each in pair)
        expected, lse = dense_attention(q[0, :, row, None], keys, values, 0.2, softcap=softcap)
        if sinks is not None:
            expected = add_sinks(expected, lse, sinks)
        found = out[0, row].double()
        torch.testing.assert_close(found, expected[:, 0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
