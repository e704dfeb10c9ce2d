"""Prefill through the chain of KV-Runahead with a partition of one's own, and the same without communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

import megakv
from megakv.attention.chain import ChainLink, ChainPlan
from megakv.attention.message import KVFormat
from megakv.attention.method import AttentionCall, KVPart, PackedAttention
from megakv.attention.runahead import Runahead
from megakv.runahead.partition import Partition

from .prefills import ContextParallelPrefill


class ChainPrefill(ContextParallelPrefill):
    """An engine's chain with one partition. Several may share the engine.

    Parameters
    ----------
    name : str
    engine : MegaKVEngine
        With the prefill method ``runahead``.
    ids : Tensor
        ``[1, S]`` the prompt.
    partition : Partition
        Tokens of each rank.
    """

    def __init__(self, name: str, engine: megakv.MegaKVEngine, ids: Tensor, partition: Partition):
        super().__init__(name, engine, ids)
        self.partition = partition

    def prepare(self) -> None:
        self.model.partitions.use(self.partition)


class SilentLink(ChainLink):
    """A place in the chain where nothing is sent, and what would be received is there at once: random numbers.

    Coordinates are the real ones, so every rank computes what it would compute. Prompts of one length must follow each
    other: messages of the same sizes are made once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._messages: dict[int, Tensor] = {}
        self._counts: list[list[int]] = []

    def start_pass(self, plan: ChainPlan) -> None:
        counts = plan.counts.tolist()
        if counts != self._counts:
            self._messages.clear()
            self._counts = counts

    def start_layer(self, call: AttentionCall, sizes: Sequence[int], following: Sequence[tuple[int, int]]) -> None:
        pass

    def send_own(self, call: AttentionCall, plan: ChainPlan, messages: KVFormat) -> None:
        pass

    def arrivals(self, call: AttentionCall, plan: ChainPlan, messages: KVFormat) -> Iterator[tuple[int, Tensor]]:
        for index in plan.incoming:
            if index not in self._messages:
                self._messages[index] = fake_message(call, plan, messages, index)
            yield index, self._messages[index]


def fake_message(call: AttentionCall, plan: ChainPlan, messages: KVFormat, index: int) -> Tensor:
    """What the rank that computes a message's tokens would send, but for the numbers in it."""
    # Each rank's messages begin with the first row of its tokens; ranks without tokens have none.
    begun = sum(first == 0 for first, _ in plan.rows[: index + 1])
    source = [tokens for tokens in call.layout.tokens if len(tokens)][begun - 1]
    tokens = source.take(np.arange(*plan.rows[index]))
    parts = []
    for sequence in range(tokens.batch):
        run = tokens.run(sequence)
        if run.stop > run.start:
            k_KSD, v_KSD = (
                torch.randn(call.kv_heads, run.stop - run.start, dim).to(call.q_HLD)
                for dim in (call.key_dim, call.value_dim)
            )
            parts.append(KVPart(sequence, k_KSD, v_KSD, tokens.slot[run], tokens.position[run]))
    message = torch.empty(messages.nbytes(index), dtype=torch.uint8, device=call.q_HLD.device)
    messages.pack(parts, message)
    return message


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
