"""The ring that both pass-KV and pass-Q run: one buffer is used while the next is on its way."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megakv.attention.message import MessageFormat, Scratch
from megakv.attention.method import AttentionCall


def pass_around(
    call: AttentionCall, messages: MessageFormat, own: Tensor, scratch: Scratch, *, operation: str
) -> Iterator[tuple[int, Tensor]]:
    """Let every rank's message visit this rank, its own first: the rank that it comes from, and the message.

    While the caller works on a message, which it may read until it asks for the next one, it is also being sent on, and
    the next one is being received. Transfers are counted as `operation`.
    """
    held = own
    for step in range(call.size):
        source = (call.rank - step) % call.size
        if step + 1 == call.size:
            yield source, held
            return
        # Two receive buffers: one is worked on and sent on while the other fills.
        receive = scratch.take(f"receive{step % 2}", messages.nbytes((source - 1) % call.size), own.device)
        transfer = call.comm.shift(held, receive, operation=operation, layer=call.layer)
        yield source, held
        transfer.wait()
        held = receive
