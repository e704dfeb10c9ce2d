"""All-gather pass-KV, the form used in Llama 3 training: a baseline without overlap."""

from __future__ import annotations

from torch import Tensor

from megakv.attention.method import AttentionCall
from megakv.attention.partial import PackedAttention, PartialAttention
from megakv.attention.ring import KVFormat, Scratch


class AllGatherKV:
    """Every rank first receives all keys and values, then attends to them."""

    partial_type: type[PartialAttention] = PartialAttention  # How what was gathered is attended to.

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        attention = PackedAttention(call.q_HLD, call.tokens, call.scoring, call.value_dim, self.partial_type)
        parts = call.dense_parts()
        if call.size > 1:
            messages = KVFormat(call, call.held)
            largest = max(messages.nbytes(rank) for rank in range(call.size))
            buffer = self._scratch.take("own", largest, call.q_HLD.device)
            messages.pack(parts, buffer[: messages.nbytes(call.rank)])
            everything = self._scratch.take("all", call.size * largest, call.q_HLD.device)
            gathered = call.comm.all_gather(
                buffer, operation="all_gather", layer=call.layer, receive=everything.view(call.size, largest)
            )
            for source in range(call.size):
                if source != call.rank:
                    parts += messages.unpack(source, gathered[source, : messages.nbytes(source)])
        with call.comm.ledger.compute("attention", call.layer):
            for part in parts:
                attention.add(part)
        return attention.result()
