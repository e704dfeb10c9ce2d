"""A ring in both directions: keys and values go both ways around and meet, in half as many steps.

``"plugins": ["two_ways"]`` and ``"prefill": "two_ways"`` ask for it.
"""

from __future__ import annotations

from torch import Tensor

import megakv
from megakv.attention.method import AttentionCall
from megakv.attention.partial import PackedAttention
from megakv.attention.ring import KVFormat, Scratch


class TwoWays:
    """Each step brings the shard of the next rank to the left, and that of the next rank to the right."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Outputs ``[H, L, Dv]`` and log-sum-exps ``[H, L]`` of this rank's queries."""
        attention = PackedAttention(call.q_HLD, call.tokens, call.scoring, call.value_dim)
        messages, parts = KVFormat(call, call.held), call.dense_parts()

        def take(name: str, source: int) -> Tensor:
            # Sizes need no message: every rank knows what every rank holds.
            return self._scratch.take(name, messages.nbytes(source), call.q_HLD.device)

        own = take("own", call.rank)
        messages.pack(parts, own)
        held = {1: own, -1: own}
        for step in range(1, call.size // 2 + 1):
            # Where both ways lead to the same rank they have met: one brings its shard.
            ways = (1, -1) if 2 * step < call.size else (1,)
            sources = {way: (call.rank - way * step) % call.size for way in ways}
            coming = {way: take(f"{way} {step % 2}", source) for way, source in sources.items()}
            transfers = [
                call.comm.shift(held[way], coming[way], operation="two_ways", layer=call.layer, steps=(way, -way))
                for way in ways
            ]
            # What has come is attended to while it is sent on.
            with call.comm.ledger.compute("attention", call.layer):
                for part in parts:
                    attention.add(part)
            for transfer in transfers:
                transfer.wait()
            held = coming
            parts = [part for way, source in sources.items() for part in messages.unpack(source, coming[way])]
        with call.comm.ledger.compute("attention", call.layer):
            for part in parts:
                attention.add(part)
        return attention.result()


megakv.register_prefill_method("two_ways", TwoWays, decode=True)
