"""Ring pass-Q (context parallelism, Algorithms 3 and 4): keys and values stay, queries travel."""

from __future__ import annotations

import torch
from torch import Tensor

from megakv.attention.merge import merge_parts
from megakv.attention.message import QueryFormat, Scratch
from megakv.attention.method import AttentionCall, PackedAttention


class PassQ:
    """Each rank's queries visit every other rank; partial outputs and log-sum-exps return by one All2All.

    No query is padded: ranks without a token pass an empty message, which costs nothing.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        parts = list(call.local_parts())
        messages = QueryFormat(call)
        device = call.q_HLD.device
        ledger = call.comm.ledger
        q_HLD, tokens = call.q_HLD, call.tokens
        held = self._scratch.take("own", messages.nbytes(call.rank) if call.size > 1 else 0, device)
        if call.size > 1:
            messages.pack(q_HLD, tokens, held)
        partials: dict[int, tuple[Tensor, Tensor]] = {}
        for step in range(call.size):
            source = (call.rank - step) % call.size
            transfer = None
            if step + 1 < call.size:
                receive = self._scratch.take(f"receive{step % 2}", messages.nbytes((source - 1) % call.size), device)
                transfer = call.comm.shift(
                    held,
                    receive,
                    operation="pass_q",
                    layer=call.layer,
                    header_bytes=messages.header_bytes(source),
                )
            with ledger.compute("attention", call.layer):
                attention = PackedAttention(q_HLD, tokens, call.scoring, call.value_dim)
                for part in parts:
                    attention.add(part)
                partials[source] = attention.result()
            if transfer is not None:
                transfer.wait()
                held = receive
                q_HLD, tokens = messages.unpack((source - 1) % call.size, held)
        return self._return(call, partials) if call.size > 1 else partials[call.rank]

    @staticmethod
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
