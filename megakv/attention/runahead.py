"""KV-Runahead (its Section 4): a chain of ranks, each computing its part on top of what came before it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megakv.attention.chain import ChainLink, ChainPlan
from megakv.attention.method import AttentionCall
from megakv.attention.partial import KVPart, PackedAttention, dense
from megakv.attention.pass_kv import attend_to_all_shards
from megakv.attention.pass_q import visit_all_shards
from megakv.attention.ring import KVFormat, Scratch
from megakv.base.errors import MegaKVError
from megakv.distributed.sharding import IntArray, Layout, TokenBlock

CHUNK_TOKENS = 1024
"""Longest message, in tokens."""


class Runahead:
    """Keys and values go down a chain of contiguous shards, point to point, without a barrier.

    In each layer a rank sends the keys and values of its own tokens to the next rank, attends to them while the prefix
    is in flight, and then takes the prefix as it arrives, nearest rank first: each message is forwarded at once and
    then attended to. Receives are posted ahead, for the next layer before its projections. Keys and values of earlier
    turns, however they are spread, are attended to by ring pass-KV; where they were compressed, by ring pass-Q.

    `chunk_tokens` are forwarded at a time: few enough for hops to overlap, enough for few merges.
    """

    def __init__(self, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._chunk_tokens = chunk_tokens
        self._scratch = Scratch()
        self._link = ChainLink()
        self._layout: Layout | None = None
        self._plan: ChainPlan | None = None
        # By window, what was cached before the pass of what queries see.
        self._cached: dict[int | None, tuple[TokenBlock, ...]] = {}
        self._layer: int | None = None
        # What follows each layer, for passes with the last layer in the chain and for those without.
        self._orders: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]] = ({}, {})
        self._following = self._orders[0]

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        attention = PackedAttention(call.q_HLD, call.tokens, call.scoring, call.value_dim)
        plan = self._planned(call)
        messages = KVFormat(call, plan.messages)
        if self._layer is not None:
            # Layers may differ in shape, and a posted receive cannot be taken back: remember which follows which.
            self._following[self._layer] = (call.layer, messages.row_bytes)
        self._layer = call.layer
        self._link.start_layer(
            call,
            [messages.nbytes(index) for index in plan.incoming],
            self._expected(call.layer, plan),
        )
        self._link.send_own(call, plan, messages)
        places = _places(call) if call.layout.gathered and call.rank == call.size - 1 else {}

        def attend(parts: Iterable[KVPart]) -> None:
            with call.comm.ledger.compute("attention", call.layer):
                for part in parts:
                    attention.add(part)
                    if places:
                        slots, keys, values = places[part.sequence]
                        start = int(slots.searchsorted(part.slots[0]))
                        rows = slice(start, start + len(part.slots))
                        keys[:, rows], values[:, rows] = part.k_KSD, part.v_KSD

        attend(call.new_parts())
        cached = self._cached_tokens(call)
        if any(map(len, cached)):
            if call.compressed:
                attention.merge(*visit_all_shards(call, self._scratch, list(call.cached_parts())))
            else:
                attend_to_all_shards(call, attention, cached, dense(call.cached_parts()), self._scratch)
        for index, message in self._link.arrivals(call, plan, messages):
            attend(messages.unpack(index, message))
        return attention.result()

    def _planned(self, call: AttentionCall) -> ChainPlan:
        """The plan of the pass that this layer belongs to."""
        if self._plan is None or self._layout is not call.layout:
            if self._layer in self._following:
                raise MegaKVError(
                    f"an earlier pass broke off in layer {self._layer}: what the ranks of the chain still had to send "
                    "would be taken for this pass's; start them anew"
                )
            self._following = self._orders[call.layout.wanted is not None]
            self._plan = ChainPlan.of(call.layout, call.rank, self._chunk_tokens)
            self._cached = {}
            self._layout, self._layer = call.layout, None
            self._link.start_pass(self._plan)
        return self._plan

    def _cached_tokens(self, call: AttentionCall) -> tuple[TokenBlock, ...]:
        window = call.scoring.window
        if window not in self._cached:
            self._cached[window] = call.cached_tokens()
        return self._cached[window]

    def _expected(self, layer: int, plan: ChainPlan) -> list[tuple[int, int]]:
        """Bytes and layer of what arrives in the next layer; nothing in the first pass, which learns it."""
        if layer not in self._following:
            return []
        following, row_bytes = self._following[layer]
        return [(len(plan.messages[index]) * row_bytes, following) for index in plan.incoming]


def _places(call: AttentionCall) -> dict[int, tuple[IntArray, Tensor, Tensor]]:
    """By sequence, the slots that the last rank stores of all ranks, and places for their keys and values."""
    stored = call.layout.stored[call.rank]
    runs = {sequence: stored.run(sequence) for sequence in range(stored.batch)}
    return {
        sequence: (stored.slot[run], *call.store.reserve(sequence, run.stop - run.start, call.k_KLD, call.v_KLD))
        for sequence, run in runs.items()
        if run.stop > run.start
    }
