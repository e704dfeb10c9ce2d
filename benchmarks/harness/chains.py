"""Prefill through the chain of KV-Runahead with a partition of one's own, and the same without communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import megakv
from megakv.attention.chain import ChainLink, ChainPlan
from megakv.attention.message import KVFormat
from megakv.attention.method import AttentionCall, PackedAttention
from megakv.attention.runahead import Runahead
from megakv.runahead.partition import Partition

from .prefills import ContextParallelPrefill


class ChainPrefill(ContextParallelPrefill):
    """An engine's chain with one partition. Several may share the engine."""

    def __init__(self, name: str, engine: megakv.MegaKVEngine, ids: Tensor, partition: Partition):
        super().__init__(name, engine, ids)
        self.partition = partition

    def prepare(self) -> None:
        self.model.partitions.use(self.partition)


class SilentLink(ChainLink):
    """A place in the chain where nothing is sent, and what would be received is there at once: random numbers.

    Tokens are the real ones, so every rank computes what it would compute. Messages of the same sizes are made once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._messages: dict[tuple[int, int], Tensor] = {}

    def start_pass(self, plan: ChainPlan) -> None:
        pass

    def start_layer(self, call: AttentionCall, sizes: Sequence[int], following: Sequence[tuple[int, int]]) -> None:
        pass

    def send_own(self, call: AttentionCall, plan: ChainPlan, messages: KVFormat) -> None:
        pass

    def arrivals(self, call: AttentionCall, plan: ChainPlan, messages: KVFormat) -> Iterator[tuple[int, Tensor]]:
        for index in plan.incoming:
            key = index, messages.nbytes(index)
            if key not in self._messages:
                numbers = torch.randn(key[1] // call.q_HLD.element_size())
                self._messages[key] = numbers.to(call.q_HLD).view(torch.uint8)
            yield index, self._messages[key]


class SilentQueries:
    """The visits of the last layer's queries without their ways: every rank attends for random ones at once."""

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        heads, _, dim = call.q_HLD.shape
        found: dict[int, tuple[Tensor, Tensor]] = {}
        with call.comm.ledger.compute("attention", call.layer):
            for rank, tokens in enumerate(call.queries):
                own = rank == call.rank
                queries = call.q_HLD if own else torch.randn(heads, len(tokens), dim).to(call.q_HLD)
                attention = PackedAttention(queries, tokens, call.scoring, call.value_dim)
                for part in call.local_parts():
                    attention.add(part)
                found[rank] = attention.result()
        return found[call.rank]


def silence(engine: megakv.MegaKVEngine) -> None:
    """Let an engine's chain send nothing from now on: what it computes is worth nothing but its time."""
    method = engine._runtime.methods["runahead"]
    assert isinstance(method, Runahead)
    method._link = SilentLink()
    engine._runtime.methods["pass_q"] = SilentQueries()
