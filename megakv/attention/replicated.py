"""Attention whose queries stay: on ranks that have them all, or on the one rank that has everything."""

from __future__ import annotations

import torch
from torch import Tensor

from megakv.attention.merge import merge_parts
from megakv.attention.method import AttentionCall, attend_here


class Replicated:
    """Each rank attends to its own keys and values with all queries; one all-gather merges the partial results.

    Right for decoding fewer sequences than ranks, where ring pass-Q would leave ranks without a token anyway.
    """

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        assert call.layout.replicated or call.size == 1
        with call.comm.ledger.compute("attention", call.layer):
            out, lse = attend_here(call, call.q_HLD, call.tokens)
        if call.size == 1:
            return out, lse
        both = torch.cat([out, lse.unsqueeze(-1)], dim=-1)
        gathered = call.comm.all_gather(both, operation="replicated", layer=call.layer)
        return merge_parts(gathered[..., :-1], gathered[..., -1])


class Local:
    """Each rank attends to its own keys and values, without communication: those of a sequence lie on one rank."""

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        with call.comm.ledger.compute("attention", call.layer):
            return attend_here(call, call.q_HLD, call.tokens)
