"""Ring pass-KV (context parallelism, Algorithm 2): queries stay, keys and values travel."""

from __future__ import annotations

from torch import Tensor

from megakv.attention.message import KVFormat, Scratch
from megakv.attention.method import AttentionCall, PackedAttention


class PassKV:
    """Each rank's keys and values visit every other rank; the next hop is in flight while the present part is used."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def __call__(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        attention = PackedAttention(call.q_HLD, call.tokens, call.scoring, call.value_dim)
        parts = list(call.local_parts())
        messages = KVFormat(call)
        device = call.q_HLD.device
        ledger = call.comm.ledger
        held = self._scratch.take("own", messages.nbytes(call.rank) if call.size > 1 else 0, device)
        if call.size > 1:
            messages.pack(parts, held)
        for step in range(call.size):
            source = (call.rank - step) % call.size
            transfer = None
            if step + 1 < call.size:
                # Two receive buffers: one is attended to and forwarded while the other fills.
                receive = self._scratch.take(f"receive{step % 2}", messages.nbytes((source - 1) % call.size), device)
                transfer = call.comm.shift(
                    held,
                    receive,
                    operation="pass_kv",
                    layer=call.layer,
                    header_bytes=messages.header_bytes(source),
                )
            with ledger.compute("attention", call.layer):
                for part in parts:
                    attention.add(part)
            if transfer is not None:
                transfer.wait()
                held = receive
                parts = messages.unpack((source - 1) % call.size, held)
        return attention.result()
