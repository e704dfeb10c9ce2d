"""The ring that both pass-KV and pass-Q run: one buffer is used while the next is on its way."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megakv.attention.message import MessageFormat, Scratch
from megakv.attention.method import AttentionCall


def pass_around(
    call: AttentionCall, messages: MessageFormat, own: Tensor, scratch: Scratch, *, operation: str
) -> Iterator[tuple[int, Tensor]]:
    """Let every rank's message visit this rank, its own first.

    While the caller works on a message, it is also being sent on, and the next one is being received.

    Parameters
    ----------
    call : AttentionCall
    messages : MessageFormat
        A message of each rank.
    own : Tensor
        This rank's message.
    scratch : Scratch
        Where messages are received.
    operation : str
        What the transfers are counted as.

    Yields
    ------
    int, Tensor
        The rank that a message comes from, and the message, which may be read until the next one is asked for.
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
