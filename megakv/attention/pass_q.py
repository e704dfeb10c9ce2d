"""Ring pass-Q (context parallelism, Algorithms 3 and 4): keys and values stay, queries travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megakv.attention.merge import merge_parts
from megakv.attention.method import AttentionCall, attend_here
from megakv.attention.partial import Part
from megakv.attention.ring import QueryFormat, Scratch, pass_around


class PassQ:
    """Each rank's queries visit every other rank; partial outputs and log-sum-exps return by one All2All.

    No query is padded: ranks without a token pass an empty message, which costs nothing.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return visit_all_shards(call, self._scratch)


def visit_all_shards(
    call: AttentionCall, scratch: Scratch, parts: Sequence[Part] | None = None
) -> tuple[Tensor, Tensor]:
    """Let every rank's queries visit this rank, its own first, and attend to its shard; then bring results home.

    `parts` are those of this rank's shard, all of the call's if None. Returns ``[H, L, Dv]`` and ``[H, L]`` of this
    rank's queries over all shards.
    """
    messages = QueryFormat(call)
    partials: dict[int, tuple[Tensor, Tensor]] = {}
    for source, message in pass_around(call, messages, call.q_HLD, scratch, operation="pass_q"):
        with call.comm.ledger.compute("attention", call.layer):
            visiting = (call.q_HLD, call.tokens) if source == call.rank else messages.unpack(source, message)
            partials[source] = attend_here(call, *visiting, parts)
    return _return(call, partials) if call.size > 1 else partials[call.rank]


def _return(call: AttentionCall, partials: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Bring every rank's partial results for this rank's queries home and merge them (Equation 4)."""
    heads, rows = call.q_HLD.shape[:2]
    width = call.value_dim + 1
    pieces = [torch.cat([out, lse.unsqueeze(-1)], dim=-1).reshape(-1) for _, (out, lse) in sorted(partials.items())]
    returned = call.comm.cp_all_to_all(
        torch.cat(pieces),
        [piece.numel() for piece in pieces],
        [heads * rows * width] * call.size,
        operation="pass_q_return",
        layer=call.layer,
    ).view(call.size, heads, rows, width)
    return merge_parts(returned[..., :-1], returned[..., -1])
