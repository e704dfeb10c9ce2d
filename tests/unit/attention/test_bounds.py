"""Tables that do not fit: compiled calls say which, and touch nothing."""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megakv.attention.compiled import DecodeKernel, Packing, RowTable, RowTables, Run, load_kernel
from megakv.attention.layer import LayerCalls, LayerKernel, LayerWeights, Norm, Weight, load_layer
from megakv.attention.linear import LinearKernel, load_linear
from megakv.attention.prefill import PrefillKernel, load_prefill
from megakv.attention.reference import Alibi, Scoring
from megakv.attention.step import StepKernel, TokenStep, load_step
from megakv.attention.token_layer import LayerRanks, WholeLayer, WholeLayersCall
from megakv.distributed.channel import SLOT_BYTES, Channel, load_channel
from megakv.distributed.ledger import Ledger
from tests.drawn_layers import random_layer

HEADS, DIM, ROWS = 2, 8, 5


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def loaded(load: Callable[[], tuple[Any, str]]) -> Any:
    found, reason = load()
    if found is None:
        pytest.skip(f"no compiled kernel: {reason}")
    return found


def refused(what: str) -> Any:
    return pytest.raises(RuntimeError, match=f"was given {what} that do not fit together")


def pair(tokens: int = ROWS, heads: int = HEADS, dim: int = DIM) -> tuple[Tensor, Tensor]:
    return torch.randn(heads, tokens, dim), torch.randn(heads, tokens, dim)


def test_runs_and_bounds_of_sequences() -> None:
    kernel: DecodeKernel = loaded(load_kernel)
    (k, v), q = pair(), torch.randn(2, 2 * HEADS, 1, DIM)
    own = Run.of(k, v)

    def call(run: Run = own, counts: Sequence[int] = (1, 1), heads: int = HEADS, value_dim: int = DIM) -> None:
        table = RowTable.at(np.array([own, run], dtype=np.int64), counts)
        kernel.ready(q, table, heads, value_dim, 1.0)()

    call()
    for counts in ((1, 2), (2, -1), (-1, 3), (2,), (1, 1, 0)):
        with refused("bounds of sequences"):
            call(counts=counts)
    for wrong in (
        {"tokens": ROWS + 1},
        {"tokens": -1},
        {"k_step": DIM + 1},
        {"v_head": ROWS * DIM + 1},
        {"k_head": -1},
    ):
        with refused("runs"):
            call(own._replace(**wrong))
    for shape in ({"heads": 2 * HEADS}, {"value_dim": DIM + 1}):
        with refused("runs"):
            call(**shape)
    packing = Packing(8, 4, 2 * HEADS * DIM, 0)
    rows = torch.zeros(3, 2 * HEADS * DIM + 8 * HEADS * DIM // 2, dtype=torch.uint8)
    for given, what in (
        (packing, ""), (packing._replace(halves=1), ""), (packing._replace(group=2), "runs"),
        (packing._replace(group=3), "sizes"), (packing._replace(bits=5), "sizes"), (packing._replace(width=8), "sizes"),
    ):  # fmt: skip
        ready = kernel.rows(q, [[rows]] * 2, HEADS, DIM, 1.0, given)
        if what:
            with refused(what):
                ready()
        else:
            ready()


def test_drawn_runs_are_refused_where_they_leave_their_memory() -> None:
    kernel: DecodeKernel = loaded(load_kernel)
    counts = [0, 0]
    for _ in range(300):
        (k, v), q = pair(), torch.randn(HEADS, 1, DIM)
        fields = ("tokens", "k_head", "k_step", "v_head", "v_step", "k_size", "v_size")
        drawn = {name: int(torch.randint(-1, 2 * ROWS * DIM, ())) for name in fields if torch.rand(()) < 0.25}
        drawn |= {name: min(size, HEADS * ROWS * DIM) for name, size in drawn.items() if name.endswith("size")}
        run = Run.of(k, v)._replace(**drawn)
        reach = ((HEADS - 1) * step + (run.tokens - 1) * row + DIM <= size for step, row, size in
                 ((run.k_head, run.k_step, run.k_size), (run.v_head, run.v_step, run.v_size)))  # fmt: skip
        fits = min(run[2:7]) >= 0 and (run.tokens == 0 or all(reach))
        counts[fits] += 1
        ready = kernel.ready(q, RowTable.of([[run]]), HEADS, DIM, 1.0)
        if fits:
            ready()
        else:
            with refused("runs"):
                ready()
    assert min(counts) > 20


def test_masks_and_biases_of_prompts() -> None:
    kernel: PrefillKernel = loaded(load_prefill)
    (k, v), q, low = pair(), torch.randn(2 * HEADS, 3, DIM), np.zeros(3, dtype=np.int64)
    slots, keys, slopes = torch.arange(3), torch.arange(ROWS), torch.ones(2 * HEADS)
    kernel(q, k, v, 1.0, ranges=(low, low + 2), alibi=Alibi(slopes, slots, keys))
    for ranges in ((low[:2], low), (low, low[:2]), (low.astype(np.int32), low)):
        with refused("rows"):
            kernel(q, k, v, 1.0, ranges=ranges)
    for alibi in (Alibi(slopes[1:], slots, keys), Alibi(slopes, slots[1:], keys), Alibi(slopes, slots, keys[1:])):
        with refused("rows"):
            kernel(q, k, v, 1.0, alibi=alibi)
    for keys_given, values in ((k, v[:, 1:]), (k[:, 1:], v), (k[:1], v)):
        with refused("runs"):
            kernel(q, keys_given, values, 1.0)


def test_products() -> None:
    kernel: LinearKernel = loaded(load_linear)
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    kernel(x, weight, bias)
    for given in ((x[:, 1:], weight, bias), (x, weight[:, 1:], bias), (x, weight, bias[1:])):
        with refused("weights"):
            kernel(*given)
    x, packed = torch.randn(3, 64), torch.zeros(5, 40, dtype=torch.uint8)
    kernel(x, packed, blocks=3)
    # No such type; rows that are no whole blocks, or lie one in the other.
    for given, memory, blocks in ((x, packed, 1), (x[:, 1:], packed, 3), (x, packed[:, 1:], 12), (x, packed, 8)):
        with refused("weights"):
            kernel(given, memory, blocks=blocks)
        with refused("weights"):
            kernel.unpack(memory, given.shape[1], blocks, torch.empty(5, given.shape[1]))


def test_rows_of_a_step() -> None:
    kernel: StepKernel = loaded(load_step)
    memory = [pair() for _ in range(2)]
    held = [Run.of(*each) for each in memory]
    new, q = [each[None] for each in pair(tokens=3)], torch.randn(1, 2 * HEADS, 3, DIM)

    def call(
        table: RowTable | None = None, bounds: Sequence[int] = (0, 1, 3), seen: int = 3, window: int | None = 2,
        k: Tensor = new[0], v: Tensor = new[1], sinks: int = 2 * HEADS, part: slice = slice(None),
    ) -> None:  # fmt: skip
        table = RowTable.of([[run] for run in held], [0, 0], torch.float32) if table is None else table
        gather = lambda own, layer: torch.stack([own] * 2)[:, part]  # noqa: E731
        windows = lambda window: np.zeros(seen, dtype=np.int64)  # noqa: E731
        step = TokenStep(kernel, bounds, range(bounds[-1]), windows, gather, Ledger().compute)
        step.attend(0, table, q, k, v, Scoring(1.0, window), torch.randn(sinks))

    def table(*runs: Run, sequences: int = 2, **wrong: int) -> RowTable:
        changed = [run._replace(**wrong) for run in runs]
        return RowTable.of([[run] for run in changed][:sequences], [0] * sequences, torch.float32)

    call()
    call(seen=1, window=None)
    grown = table(*held)
    grown.add(1, 1)
    for found in (grown, table(*held, tokens=1), table(*held, k_step=DIM + 1), table(*held, tokens=-1)):
        with refused("runs"):
            call(found)
    lost = table(*held)
    lost._bounds[2] = 3
    for found in (table(*held, sequences=1), table(*held, *held, sequences=4), lost):
        with refused("bounds of sequences"):
            call(found)
    for wrong in ({"seen": 2}, {"bounds": (0, 1, 2)}):
        with refused("rows"):
            call(**wrong)
    for wrong in ({"k": new[0][:, :, 1:]}, {"v": new[1][:, :, 1:]}):
        with pytest.raises(AssertionError, match="other rows than queries"):
            call(**wrong)
    with refused("rows"):
        call(part=slice(1, None))
    with refused("sizes"):
        call(sinks=2 * HEADS - 1)


def layer(**sizes: int) -> LayerWeights:
    given = {"hidden": 12, "heads": 2 * HEADS, "kv_heads": HEADS, "head_dim": DIM, "width": 20} | sizes
    return random_layer(torch.float32, torch.default_generator, activation=1, **given)


def less(part: Weight | Norm, what: str) -> Weight | Norm:
    """A row, a column, or one number of a bias is not there."""
    if isinstance(part, Norm):
        return replace(part, weight=part.weight[1:])
    assert part.bias is not None
    match what:
        case "row":
            return Weight(part.weight[1:], part.bias[1:])
        case "column":
            return Weight(part.weight[:, 1:], part.bias)
    return Weight(part.weight, part.bias[1:])


def test_weights_of_a_layer() -> None:
    kernel: LayerKernel = loaded(load_layer)
    whole, rows = layer(), 3
    x, angles, attended = (torch.randn(rows, size) for size in (12, DIM, 2 * HEADS * DIM))

    def call(weights: LayerWeights) -> None:
        calls = LayerCalls(kernel, weights)
        calls.project(x, angles, angles, whole=True)
        calls.feed_forward(x, attended, projected=False, whole=True)

    call(whole)
    norms = {name: less(getattr(whole, name), "") for name in ("output_norm", "q_norm", "k_norm")}
    linears = ("q", "k", "v", "o", "gate", "up", "down")
    parts = [(name, less(getattr(whole, name), what)) for name in linears for what in ("row", "column", "bias")]
    for name, part in (*norms.items(), *parts):
        with refused("weights"):
            call(replace(whole, **{name: part}))
    with refused("sizes"):
        LayerCalls(kernel, replace(whole, kv_heads=3)).add(x, x[None], None)
    calls = LayerCalls(kernel, whole)
    packed = calls.project(x, angles, angles, whole=True)
    for wrong in (
        lambda: calls.project(x, angles[1:], angles, whole=True),
        lambda: calls.rotate(packed[:, 1:], angles, angles),
        lambda: calls.feed_forward(x, attended[1:], projected=False, whole=True),
        lambda: calls.add(x, torch.stack([x] * 2)[:, 1:], None),
        lambda: calls.normed(x, x[1:], torch.float32, behind=True),
        lambda: calls.gated(attended, attended[1:]),
    ):
        with pytest.raises(AssertionError):
            wrong()


def one_rank(**wrong: Any) -> Channel:
    """A channel of nobody else, with fields that are wrong."""
    calls = loaded(load_channel)
    found = Channel(calls, [0], 0, {}, memory=mmap.mmap(-1, calls.bytes(1, SLOT_BYTES)), timeout_s=5)
    for name, value in wrong.items():
        setattr(found._channel, name, value)
    return found


def test_layers_and_what_ranks_have_of_them() -> None:
    kernel: LayerKernel = loaded(load_layer)
    step: StepKernel = loaded(load_step)
    whole, rows = layer(), 3
    x, angles, columns = torch.randn(rows, 12), torch.randn(rows, DIM), 4 * HEADS * DIM
    held = [pair() for _ in range(rows)]

    def call(
        ranks: LayerRanks, weights: LayerWeights = whole, sequences: int = rows, tables: int = 1, others: Any = ()
    ) -> None:
        layers = [WholeLayer(LayerCalls(kernel, each), ranks, 1.0) for each in (weights, *others)]
        one = TokenStep(step, range(sequences + 1), range(sequences), np.zeros, None, Ledger().compute)
        table = RowTable.of([[Run.of(*each)] for each in held], [0] * rows, torch.float32)
        WholeLayersCall(layers)(x, angles, angles, one, RowTables.of([table] * tables), None)

    every = {"inputs": one_rank(), "partial": one_rank(), "outputs": one_rank(), "feed_forward": one_rank()}
    biases = {"outputs_bias": torch.randn(12), "feed_forward_bias": torch.randn(12)}
    fitting = LayerRanks(**every, widths=[columns], columns=(0, 2 * HEADS * DIM), **biases)
    call(fitting)
    call(LayerRanks(), tables=2, others=[whole])
    for wrong in (
        {"widths": ()}, {"widths": [columns - 1]}, {"widths": [columns, 0]}, {"columns": (0, 2 * HEADS * DIM - 1)},
        {"columns": (1, 2 * HEADS * DIM + 1)}, {"columns": (-1, 2 * HEADS * DIM - 1)},
        {"outputs_bias": torch.randn(11)}, {"feed_forward_bias": torch.randn(13)},
    ):  # fmt: skip
        with refused("parts of ranks"):
            call(replace(fitting, **wrong))
    for name in every:
        for wrong in ({"own": 1}, {"own": -1}, {"ranks": 0}, {"memory_bytes": 64}, {"slot": 0}):
            with refused("a channel"):
                call(replace(fitting, **{name: one_rank(**wrong)}))
    for wrong in ({"weights": replace(whole, q=less(whole.q, "row"))}, {"tables": 2, "others": [layer(hidden=13)]}):
        with refused("weights"):
            call(LayerRanks(), **wrong)
    with refused("sizes"):
        call(LayerRanks(), tables=2)
    with refused("rows"):
        call(LayerRanks(), sequences=rows - 1)


def test_messages() -> None:
    channel, message = one_rank(), torch.randn(7)
    channel.all_gather(message, received := torch.zeros(1, 7))
    assert torch.equal(received[0], message)
    with refused("a channel"):
        channel.all_gather(message, torch.zeros(1, 6))
    for wrong in ({"own": 1}, {"memory_bytes": SLOT_BYTES}, {"slot": -1}):
        with refused("a channel"):
            one_rank(**wrong).all_gather(message, received)


def test_types_that_no_kernel_knows() -> None:
    kernel: StepKernel = loaded(load_step)
    word = ctypes.create_string_buffer(64)
    assert kernel.merge(3, word, 2, 1, 1, 1, 1, None, 0, word) == 3
