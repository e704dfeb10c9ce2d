"""Attention without communication, for passes whose tokens all lie on one rank, cached ones too."""

from __future__ import annotations

from torch import Tensor

from megakv.attention.method import AttentionCall, PackedAttention


class Local:
    """Each rank attends to its own keys and values: decoding where the last rank holds them all."""

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        attention = PackedAttention(call.q_HLD, call.tokens, call.scoring, call.value_dim)
        with call.comm.ledger.compute("attention", call.layer):
            for part in call.local_parts():
                attention.add(part)
        return attention.result()
