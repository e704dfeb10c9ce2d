"""Ring pass-KV (context parallelism, Algorithm 2): queries stay, keys and values travel."""

from __future__ import annotations

from torch import Tensor

from megakv.attention.message import KVFormat, Scratch
from megakv.attention.method import AttentionCall, PackedAttention
from megakv.attention.ring import pass_around


class PassKV:
    """Each rank's keys and values visit every other rank."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        attention = PackedAttention(call.q_HLD, call.tokens, call.scoring, call.value_dim)
        own_parts = call.dense_parts()
        messages = KVFormat(call)
        # Alone, nothing is sent: the message stays empty.
        own = self._scratch.take("own", messages.nbytes(call.rank) if call.size > 1 else 0, call.q_HLD.device)
        if call.size > 1:
            messages.pack(own_parts, own)
        for source, message in pass_around(call, messages, own, self._scratch, operation="pass_kv"):
            with call.comm.ledger.compute("attention", call.layer):
                for part in own_parts if source == call.rank else messages.unpack(source, message):
                    attention.add(part)
        return attention.result()
