"""Attention without communication, for passes whose tokens all lie on one rank, cached ones too."""

from __future__ import annotations

from torch import Tensor

from megakv.attention.method import AttentionCall, attend_here


class Local:
    """Each rank attends to its own keys and values: decoding where the last rank holds them all."""

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        with call.comm.ledger.compute("attention", call.layer):
            return attend_here(call, call.q_HLD, call.tokens, call.local_parts())
