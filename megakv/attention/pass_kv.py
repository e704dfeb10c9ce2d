"""Ring pass-KV (context parallelism, Algorithm 2): queries stay, keys and values travel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megakv.attention.method import AttentionCall, KVPart, attend_here
from megakv.attention.partial import PackedAttention
from megakv.attention.ring import KVFormat, Scratch, pass_around
from megakv.distributed.sharding import TokenBlock


class PassKV:
    """Each rank's keys and values visit every other rank."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        if call.size == 1:
            with call.comm.ledger.compute("attention", call.layer):
                return attend_here(call, call.q_HLD, call.tokens)
        attention = PackedAttention(call.q_HLD, call.tokens, call.scoring, call.value_dim)
        attend_to_all_shards(call, attention, call.held, call.dense_parts(), self._scratch)
        return attention.result()


def attend_to_all_shards(
    call: AttentionCall,
    attention: PackedAttention,
    tokens: Sequence[TokenBlock],
    parts: Sequence[KVPart],
    scratch: Scratch,
) -> None:
    """Let every rank's shard of keys and values visit this rank, its own first, and attend to each.

    `tokens` are those of each rank's shard, `parts` this rank's; results are merged into `attention`.
    """
    messages = KVFormat(call, tokens)
    for source, message in pass_around(call, messages, parts, scratch, operation="pass_kv"):
        with call.comm.ledger.compute("attention", call.layer):
            for part in parts if source == call.rank else messages.unpack(source, message):
                attention.add(part)
