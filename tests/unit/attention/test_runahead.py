"""The chain against attention over the whole prompt: partitions, scorings, batches, pasts, and no buffer race."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from megakv.attention.chain import HELD, ChainPlan
from megakv.attention.method import AttentionCall
from megakv.attention.partial import Scoring
from megakv.attention.runahead import Runahead
from megakv.base.errors import MegaKVError
from megakv.cache.dense import DenseStore
from megakv.costmodel.context_parallel import sent_bytes
from megakv.costmodel.shape import AttentionShape
from megakv.distributed.layouts import contiguous, round_robin
from megakv.distributed.sharding import Layout, TokenBlock, TokenTable
from megakv.planner.measure.trial import tokens
from tests.reference import reference_attention
from tests.threads import ThreadComm, on_threads

HEADS = 4


@dataclass
class Model:
    """One attention layer's queries, keys and values of all tokens of all sequences, slot by slot."""

    kv_heads: int
    key_dim: int
    value_dim: int
    q_BHSD: Tensor
    k_BKSD: Tensor
    v_BKSD: Tensor

    @classmethod
    def random(cls, batch: int, slots: int) -> Model:
        kv_heads, (key_dim, value_dim) = random.choice((1, 2, 4)), random.choice(((16, 16), (24, 8)))
        # In the memory order of a projection's output.
        shapes = ((HEADS, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
        return cls(kv_heads, key_dim, value_dim, *(torch.randn(batch, slots, *s).transpose(1, 2) for s in shapes))


@dataclass
class Pass:
    """A pass over some layers, cached tokens before it."""

    layers: list[Model]
    layout: Layout
    cached: Layout | None
    scoring: Scoring

    def table(self) -> TokenTable:
        table = TokenTable(self.layout.size, self.layout.tokens[0].batch)
        for layout in (self.cached, self.layout):
            if layout is not None:
                table.extend(layout)
        return table

    def call(self, layer: int, comm: ThreadComm) -> AttentionCall:
        model, rank = self.layers[layer], comm.mesh.cp_rank
        table, block, store = self.table(), self.layout.tokens[rank], DenseStore(self.layout.tokens[0].batch)
        for held in (self.cached, None if self.layout.gathered else self.layout):
            for sequence in range(table.batch if held is not None else 0):
                slots = held.stored[rank].slot[held.stored[rank].run(sequence)]
                if len(slots):
                    store.append(sequence, model.k_BKSD[sequence][:, slots], model.v_BKSD[sequence][:, slots])
        narrowed = self.layout.wanted is not None and layer == len(self.layers) - 1
        asked = self.layout.queries[rank] if narrowed else block
        queries, keys, values = (
            x[of.sequence, :, of.slot].transpose(0, 1)
            for x, of in ((model.q_BHSD, asked), (model.k_BKSD, block), (model.v_BKSD, block))
        )
        return AttentionCall(
            layer=layer, q_HLD=queries, k_KLD=keys, v_KLD=values, layout=self.layout, scoring=self.scoring,
            kv_heads=model.kv_heads, key_dim=model.key_dim, value_dim=model.value_dim, store=store, table=table,
            comm=comm, narrowed=narrowed,
        )  # fmt: skip

    def check(self, layer: int, block: TokenBlock, out: Tensor, lse: Tensor) -> None:
        """Compare one rank's result with attention over everything."""
        model = self.layers[layer]
        assert out.shape == (HEADS, len(block), model.value_dim) and out.dtype == torch.float32
        for sequence in range(block.batch):
            run = block.run(sequence)
            if run.stop == run.start:
                continue
            slots, last = block.slot[run], int(block.slot[run][-1])
            everything = np.arange(last + 1)
            wanted = reference_attention(
                model.q_BHSD[sequence][:, slots], model.k_BKSD[sequence][:, : last + 1],
                model.v_BKSD[sequence][:, : last + 1], slots, everything, self.scoring,
            )  # fmt: skip
            torch.testing.assert_close(out[:, run].double(), wanted[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse[:, run].double(), wanted[1], rtol=1e-5, atol=1e-5)


def run(passes: list[Pass], chunk_tokens: int) -> list[ThreadComm]:
    """All passes on one chain, every result checked; the ranks' communicators."""

    def work(comm: ThreadComm) -> ThreadComm:
        method = Runahead(chunk_tokens)
        for index, step in enumerate(passes):
            comm.log.append(("pass", index))
            # A narrowed last layer is in the chain only where it gathers.
            outside = step.layout.wanted is not None and not step.layout.gathered
            for layer in range(len(step.layers) - outside):
                call = step.call(layer, comm)
                step.check(layer, call.tokens, *method(call))
                check_store(step, layer, call)
        return comm

    return on_threads(passes[0].layout.size, work)


def check_store(step: Pass, layer: int, call: AttentionCall) -> None:
    """Whatever the table says a rank holds is in its store, in slot order."""
    for part in call.parts:
        model = step.layers[layer]
        assert torch.equal(part.k_KSD, model.k_BKSD[part.sequence][:, part.slots])
        assert torch.equal(part.v_KSD, model.v_BKSD[part.sequence][:, part.slots])


def prompt(
    partitions: list[list[int]], *, layers: int = 1, gathered: bool = False, scoring: Scoring | None = None
) -> Pass:
    lengths = tuple(sum(partition) for partition in partitions)
    layout = contiguous(tokens(lengths, (0,) * len(lengths)), partitions, gathered=gathered)
    models = [Model.random(len(lengths), max(lengths)) for _ in range(layers)]
    return Pass(models, layout, None, scoring or Scoring(0.25))


PARTITIONS = [
    [[30, 30]],
    [[41, 19]],
    [[0, 9]],
    [[9, 0]],
    [[1, 60]],
    [[20, 20, 20]],
    [[30, 1, 0]],
    [[0, 0, 17]],
    [[40, 31, 22, 13]],
    [[5, 0, 1, 77]],
    [[1, 1, 1, 1]],
    [[3, 0, 0, 0], [0, 2, 0, 1], [9, 20, 0, 31], [0, 0, 0, 0]],
    [[9, 8, 7, 6, 5, 4, 3, 2]],
    [[0, 30, 0, 0, 1, 0, 2, 0], [4, 4, 4, 4, 4, 4, 4, 4]],
]


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("partitions", PARTITIONS, ids=str)
def test_every_partition_is_exact(partitions: list[list[int]], gathered: bool) -> None:
    for chunk_tokens in (random.randint(1, 12), 1000):
        run([prompt(partitions, layers=2, gathered=gathered)], chunk_tokens)


SCORINGS = {
    "window": Scoring(0.25, window=7),
    "wide window": Scoring(0.25, window=70),
    "softcap": Scoring(0.25, softcap=3.0),
    "alibi": Scoring(0.25, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
}


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS.keys())
def test_every_scoring_is_exact(scoring: Scoring, gathered: bool) -> None:
    run([prompt([[40, 31, 22, 13], [2, 3, 0, 9]], gathered=gathered, scoring=scoring)], 10)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("cached_on", ["all", "last", "one", "some sequences"])
def test_cached_tokens_are_attended_to_wherever_they_lie(cached_on: str, gathered: bool) -> None:
    cached = (33, 0 if cached_on == "some sequences" else 5)
    new = [[21, 13, 0], [1, 4, 2]]
    past = tokens(cached, (0, 0))
    if cached_on in ("all", "some sequences"):
        held = round_robin(past, 3)
    else:
        rank = 2 if cached_on == "last" else 1
        held = contiguous(past, [[length if index == rank else 0 for index in range(3)] for length in cached])
    layout = contiguous(tokens(tuple(map(sum, new)), cached), new, gathered=gathered)
    models = [Model.random(2, 33 + 34) for _ in range(3)]
    run([Pass(models, layout, held, Scoring(0.25))], 8)


def test_layers_of_other_shapes_and_passes_of_other_lengths_share_buffers() -> None:
    """Receives for the next layer are posted before this rank sends in it, from the second pass on."""
    shapes = [Model.random(1, 90) for _ in range(4)]
    whole = tokens((90,), (0,))
    partitions = [[40, 30, 20], [30, 0, 60], [40, 30, 20], [88, 1, 1]]
    passes = [Pass(shapes, contiguous(whole, [partition]), None, Scoring(0.25)) for partition in partitions]
    log = run(passes, 9)[1].log
    starts = [index for index, event in enumerate(log) if event[0] == "pass"]
    first, second, third = (log[start:end] for start, end in pairwise(starts))
    assert not any(posted_ahead(first, layer) for layer in (1, 2, 3))
    for events in (second, third):
        assert all(posted_ahead(events, layer) for layer in (1, 2, 3))


@pytest.mark.parametrize("gathered", [False, True])
def test_passes_with_and_without_the_last_layer_alternate(gathered: bool) -> None:
    """What is posted ahead in the layer before the last depends on whether the last one is in the chain."""
    shapes = [Model.random(2, 60) for _ in range(3)]
    whole, passes = tokens((60, 41), (0, 0)), []
    for index in range(8):
        first = random.randint(0, 41)
        layout = contiguous(whole, [[30, 20, 10], [first, 41 - first, 0]], gathered=gathered)
        if index not in (2, 3, 6):
            layout = layout.narrowed(whole.take(np.array([59, 100])))
            assert layout.wanted is not None and sum(map(len, layout.wanted)) == 2
        passes.append(Pass(shapes, layout, None, Scoring(0.25)))
    run(passes, 9)


def posted_ahead(events: list[tuple[str, int | None]], layer: int) -> bool:
    """Whether a layer's first receive was posted while the layer before it was still forwarding."""
    last_send = max(index for index, event in enumerate(events) if event == ("send", layer - 1))
    return events.index(("receive", layer)) < last_send


def test_buffers_are_bounded_and_kept() -> None:
    """A fast rank before a slow one never has more messages in memory than it may."""
    step = prompt([[50, 50, 50, 50]], layers=6)

    def work(comm: ThreadComm) -> int:
        method = Runahead(5)
        for layer in range(6):
            method(step.call(layer, comm))
        plan = ChainPlan.of(step.layout, comm.mesh.cp_rank, 5)
        assert method._link._made <= plan.buffers
        return plan.buffers

    assert on_threads(4, work) == [10 + 10, 10 + HELD + 10, 10 + HELD + 10, HELD]


@pytest.mark.parametrize("gathered", [False, True])
def test_messages_of_the_papers_example(gathered: bool) -> None:
    """9 tokens over 3 ranks as 4, 3, 2: 4 + 7 tokens go down the chain, K and V each: 22 entries."""
    plans = [ChainPlan.of(prompt([[4, 3, 2]], gathered=gathered).layout, rank, 2) for rank in range(3)]
    sent = [[len(plan.messages[i]) for i in (*plan.own, *plan.incoming)] if plan.sends else [] for plan in plans]
    assert 2 * sum(map(sum, sent)) == 22
    assert sent == [[2, 2], [2, 1, 2, 2], []]
    assert plans[2].incoming == [2, 3, 0, 1]


def test_nobody_sends_what_nobody_wants() -> None:
    plans = [ChainPlan.of(prompt([[4, 3, 0, 0]]).layout, rank, 9) for rank in range(4)]
    assert [plan.sends for plan in plans] == [True, False, False, False]
    assert [len(plan.incoming) for plan in plans] == [0, 1, 0, 0]
    plans = [ChainPlan.of(prompt([[4, 3, 0, 0]], gathered=True).layout, rank, 9) for rank in range(4)]
    assert [plan.sends for plan in plans] == [True, True, True, False]


@pytest.mark.parametrize("gathered", [False, True])
def test_bytes_are_those_of_the_closed_form(gathered: bool) -> None:
    for _ in range(5):
        partition = [random.choice((0, 1, random.randint(2, 60))) for _ in range(3)] + [random.randint(0, 9)]
        if sum(partition) == 0:
            continue
        chunk = random.randint(1, 30)
        step = prompt([partition], gathered=gathered)
        model = step.layers[0]
        shape = AttentionShape(HEADS, model.kv_heads, model.key_dim, model.value_dim, 4)
        kept = step.table().counts().sum(1).tolist()
        for rank, comm in enumerate(run([step], chunk)):
            found = sum(tally.bytes_sent for (name, _), tally in comm.ledger.tallies.items() if name == "runahead")
            wanted = sent_bytes("runahead", shape, new=partition, kept=kept, rank=rank)
            assert {"runahead": found} == wanted


def test_a_pass_behind_a_broken_one_is_refused() -> None:
    step = prompt([[6, 6]], layers=3)
    again = prompt([[6, 6]], layers=3)

    def work(comm: ThreadComm) -> str:
        method = Runahead(4)
        for layer in range(3):
            method(step.call(layer, comm))
        method(again.call(0, comm))
        with pytest.raises(MegaKVError, match="an earlier pass broke off in layer 0"):
            method(prompt([[6, 6]], layers=3).call(0, comm))
        return ""

    on_threads(2, work)
