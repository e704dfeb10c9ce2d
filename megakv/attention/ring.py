"""The ring that all methods run: one buffer is used while the next is on its way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor

from megakv.attention.message import MessageFormat, Scratch
from megakv.attention.method import AttentionCall

T = TypeVar("T")


def pass_around(
    call: AttentionCall, messages: MessageFormat[T], own: T, scratch: Scratch, *, operation: str
) -> Iterator[tuple[int, Tensor]]:
    """Let every rank's message visit this rank, its own first: the rank that it comes from, and the message.

    While the caller works on a message, which it may read until it asks for the next one, it is also being sent on, and
    the next one is being received. Transfers are counted as `operation`. A rank that is alone packs nothing.
    """
    device = call.q_HLD.device
    held = scratch.take("own", messages.nbytes(call.rank) if call.size > 1 else 0, device)
    if call.size > 1:
        messages.pack(own, held)
    for step in range(call.size - 1):
        source = (call.rank - step) % call.size
        # Two receive buffers: one is worked on and sent on while the other fills.
        receive = scratch.take(f"receive{step % 2}", messages.nbytes((source - 1) % call.size), device)
        transfer = call.comm.shift(held, receive, operation=operation, layer=call.layer)
        yield source, held
        transfer.wait()
        held = receive
    yield (call.rank + 1) % call.size, held
