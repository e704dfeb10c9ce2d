"""A ring method as somebody may add one: one file, and one line of the registry."""

from __future__ import annotations

from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.attention.partial import PackedAttention
from megakv.attention.ring import KVFormat, Scratch, pass_around


class ToyRing:
    """Attends to what comes from other ranks first, and to its own keys and values last."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        attention = PackedAttention(call.q_HLD, call.tokens, call.scoring, call.value_dim)
        messages, parts = KVFormat(call, call.held), call.dense_parts()
        for source, message in pass_around(call, messages, parts, self._scratch, operation="toy_ring"):
            for part in messages.unpack(source, message) if source != call.rank else []:
                attention.add(part)
        for part in parts:
            attention.add(part)
        return attention.result()
