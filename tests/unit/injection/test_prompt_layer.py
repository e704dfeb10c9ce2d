"""Layers of prompts in blocks of rows, against float64, PyTorch's own steps, and transformers."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

import megakv
from megakv.attention.layer import LayerCalls, LayerKernel, LayerWeights, Weight, load_layer
from megakv.injection import prompt_layer
from megakv.injection.layer_kind import PROBED_POSITIONS
from megakv.injection.prompt_layer import Blocks, PromptLayer
from megakv.weights.products import Products
from tests.as_large import as_large
from tests.drawn_layers import drawn, drawn_layer, reference
from tests.unit.injection.compiled_layers import model_of, tokens

KNOWN = ("llama", "llama_tied", "mistral", "qwen2", "qwen3")


@pytest.fixture
def kernel() -> Iterator[LayerKernel]:
    found, reason = load_layer()
    if found is None:
        pytest.skip(f"no compiled kernel: {reason}")
    with torch.no_grad():
        yield found


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_layer, "ROWS", 7)


def given(weights: LayerWeights, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Hidden states, rotary embeddings, and what was attended to."""
    dim = weights.head_dim
    sizes = (len(weights.input_norm.weight), dim, dim, weights.heads * dim)
    return [torch.randn(1, rows, size).to(dtype) for size in sizes]


@pytest.mark.parametrize("most", [0, 1 << 24])
@pytest.mark.parametrize(
    ("dtype", "products"),
    [
        (torch.float32, Products()),
        (torch.float32, Products(many="oneDNN")),
        (torch.bfloat16, Products(many="float32")),
        (torch.bfloat16, Products()),
        (torch.float16, Products(many="float32")),
        (torch.float32, Products(fuses=True)),
        (torch.bfloat16, Products(fuses=True)),
        (torch.float16, Products(many="float32", fuses=True)),
    ],
)
def test_it_is_at_least_as_exact_as_pytorch_s(
    kernel: LayerKernel, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, products: Products, most: int
) -> None:
    monkeypatch.setattr(prompt_layer, "MOST_WIDENED", most)
    own, torchs, blocks = list[Tensor](), list[Tensor](), Blocks()
    for _ in range(30):
        weights = drawn_layer(dtype)
        x, cos, sin, attended = given(weights, drawn(40), dtype)
        calls = LayerCalls(kernel, weights)
        layer = PromptLayer(calls, blocks, products)
        found = [part[0].transpose(0, 1).flatten(1) for part in calls.heads(layer.project(x, cos, sin))]
        found.append(layer.outputs(x, attended, (None, None))[0])
        exact = reference(weights, *(each[0].double() for each in (x, cos, sin, attended)))
        theirs = reference(weights, *(each[0] for each in (x, cos, sin, attended)))
        for mine, right, other in zip(found, exact, theirs, strict=True):
            size = right.square().mean().sqrt() + 1e-3
            own.append(((mine.double() - right) / size).square().flatten())
            torchs.append(((other.double() - right) / size).square().flatten())
    # oneDNN sums up in another order.
    bound = 2 if products.many == "oneDNN" else 1.05
    assert torch.cat(own).mean().sqrt() <= bound * torch.cat(torchs).mean().sqrt()


def test_queries_of_rows_that_are_not_wanted_are_zero(kernel: LayerKernel) -> None:
    for _ in range(10):
        weights, rows = drawn_layer(torch.float32), 5 + drawn(30)
        x, cos, sin, _ = given(weights, rows, torch.float32)
        calls = LayerCalls(kernel, weights)
        layer, wanted = PromptLayer(calls, Blocks(), Products()), torch.randperm(rows)[: drawn(4)].sort().values
        q, k, v = calls.heads(layer.project(x, cos, sin))
        some, *others = calls.heads(layer.project(x, cos, sin, wanted))
        expected = torch.zeros_like(q).index_copy_(2, wanted, q[:, :, wanted])
        for found, right in zip((some, *others), (expected, k, v), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5 * float(right.abs().max() + 1))


def test_ranks_with_a_part_each(kernel: LayerKernel) -> None:
    """Columns of the output projection and of the feed-forward, whose sums are the whole."""
    for _ in range(10):
        whole, rows = drawn_layer(torch.float32), drawn(30)
        x, _, _, attended = given(whole, rows, torch.float32)
        expected = PromptLayer(LayerCalls(kernel, whole), Blocks(), Products()).outputs(x, attended, (None, None))
        width, heads = len(whole.gate.weight), attended.shape[-1]
        cut, column = drawn(heads) - 1, drawn(width) - 1
        if not cut or not column:
            continue
        ranks = list[tuple[PromptLayer, Tensor]]()
        for own, inner in ((slice(0, cut), slice(0, column)), (slice(cut, heads), slice(column, width))):
            weights = replace(
                whole,
                o=Weight(whole.o.weight[:, own]),
                gate=_rows(whole.gate, inner),
                up=_rows(whole.up, inner),
                down=Weight(whole.down.weight[:, inner]),
            )
            ranks.append((PromptLayer(LayerCalls(kernel, weights), Blocks(), Products()), attended[..., own]))
        for found in _together(x, ranks, [whole.o.bias, whole.down.bias]):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def _rows(linear: Weight, some: slice) -> Weight:
    return Weight(linear.weight[some], None if linear.bias is None else linear.bias[some])


def _together(x: Tensor, ranks: list[tuple[PromptLayer, Tensor]], biases: list[Tensor | None]) -> list[Tensor]:
    """What two ranks find that wait for each other at both sums."""
    meeting, parts = Barrier(len(ranks), timeout=60), [x] * len(ranks)

    def compute(rank: int) -> Tensor:
        def sum_of(bias: Tensor | None) -> Callable[[Tensor], Tensor]:
            def summed(part: Tensor) -> Tensor:
                parts[rank] = part
                meeting.wait()
                total = parts[0] + parts[1]
                meeting.wait()
                return total if bias is None else total + bias

            return summed

        layer, attended = ranks[rank]
        with torch.no_grad():
            return layer.outputs(x, attended, (sum_of(biases[0]), sum_of(biases[1])))

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(compute, range(len(ranks))))


@pytest.fixture
def rows(alone: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every layer that was computed so, but for the one that was probed."""
    if load_layer()[0] is None:
        pytest.skip(f"no compiled kernel: {load_layer()[1]}")
    taken: list[int] = []
    outputs = PromptLayer.outputs

    def noted(self: PromptLayer, x: Tensor, *arguments: Any) -> Tensor:
        if x.shape[1] != len(PROBED_POSITIONS):
            taken.append(x.shape[1])
        return outputs(self, x, *arguments)

    monkeypatch.setattr(PromptLayer, "outputs", noted)
    return taken


def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False, **options).logits
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_models_are_transformers_own(rows: list[int], name: str) -> None:
    """All logits, those of a few columns, and tokens; in a batch with padding, in pieces."""
    model = model_of(name)
    ids, layers = torch.randint(3, 100, (1, 90)), len(model.model.layers)
    batch, mask = torch.randint(3, 100, (3, 33)), torch.ones(3, 33, dtype=torch.long)
    mask[1, :30] = mask[2, :1] = 0
    padded = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    everything, several, expected = logits(model, ids), model.generate(batch, **padded), tokens(model, ids)
    with megakv.init_inference(model, {"dtype": "fp32"}) as engine:
        torch.testing.assert_close(logits(engine, ids), everything, rtol=1e-4, atol=1e-5)
        assert rows == [90] * layers
        rows.clear()
        some = logits(engine, ids, logits_to_keep=torch.tensor([-1, 3]))
        torch.testing.assert_close(some, everything[:, [-1, 3]], rtol=1e-4, atol=1e-5)
        # Of the last layer those alone.
        assert rows == [90] * (layers - 1) + [2]
        rows.clear()
        assert tokens(engine, ids) == expected and rows == [90] * (layers - 1) + [1]
        rows.clear()
        assert torch.equal(engine.generate(batch, **padded), several)
        assert rows == [33 + 3 + 32] * (layers - 1) + [3]


def test_pieces_and_few_rows_are_as_before(rows: list[int]) -> None:
    model, ids = model_of("llama"), torch.randint(3, 100, (1, 60))
    expected = tokens(model, ids)
    with as_large({}):
        engine = megakv.init_inference(model, {"dtype": "fp32"})
    with engine:
        found = engine.generate(ids, max_new_tokens=12, do_sample=False, prefill_chunk_size=22)
        assert found[0].tolist() == expected and max(rows) == 22
    with megakv.init_inference(model_of("llama"), {"dtype": "fp32"}) as engine:
        rows.clear()
        assert tokens(engine, ids) == expected and not rows


def test_those_who_listen_hear_all_rows(rows: list[int]) -> None:
    """And weights that are replaced between two prompts count."""
    model, ids = model_of("llama"), torch.randint(3, 100, (1, 80))
    expected, heard = logits(model, ids), list[int]()
    with megakv.init_inference(model, {"dtype": "fp32"}) as engine:
        layers = engine.module.model.layers
        handle = layers[0].mlp.up_proj.register_forward_hook(lambda *given: heard.append(given[2].shape[1]))
        torch.testing.assert_close(logits(engine, ids), expected, rtol=1e-4, atol=1e-5)
        assert heard == [80] and rows == [80] * (len(layers) - 1)
        handle.remove()
        rows.clear()
        with torch.no_grad():
            layers[1].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros_like(layers[1].mlp.down_proj.weight))
        other = model_of("llama")
        with torch.no_grad():
            other.model.layers[1].mlp.down_proj.weight.zero_()
        torch.testing.assert_close(logits(engine, ids), logits(other, ids), rtol=1e-4, atol=1e-5)
        assert rows == [80] * len(layers)


def test_linears_of_somebody_else_s_class_are_called(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of("llama"), torch.randint(3, 100, (1, 80))
    expected, called, forward = logits(model, ids), list[int](), torch.nn.Linear.forward
    with megakv.init_inference(model, {"dtype": "fp32"}) as engine:

        def counted(linear: torch.nn.Linear, x: Tensor) -> Tensor:
            called.append(x.shape[-2])
            return forward(linear, x)

        monkeypatch.setattr(torch.nn.Linear, "forward", counted)
        torch.testing.assert_close(logits(engine, ids), expected, rtol=1e-4, atol=1e-5)
        assert called and not rows
        monkeypatch.undo()


@pytest.mark.parametrize("products", [Products(many="float32"), Products(fuses=True)], indirect=True)
def test_calls_in_inference_mode_leave_nothing_behind(rows: list[int], products: Products) -> None:
    # Of fewer tokens than that all layers may be one call.
    length = products.whole_rows + 70
    model, ids = model_of("llama").bfloat16(), torch.randint(3, 100, (1, length))
    with megakv.init_inference(model, {"dtype": "bf16"}) as engine:
        with torch.inference_mode():
            expected = engine.module(input_ids=ids).logits.float()
        assert torch.equal(logits(engine, ids).float(), expected)
        assert rows == 2 * len(engine.module.model.layers) * [length]
