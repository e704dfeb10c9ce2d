"""Context-parallel ranks as threads of one process, whose messages are delivered as late as a network may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megakv.distributed.ledger import Ledger

T = TypeVar("T")
PATIENCE_S = 20.0


@dataclass
class Sent:
    """A message under way: what was to be sent, and whether it was received."""

    buffer: Tensor
    content: Tensor
    received: threading.Event = field(default_factory=threading.Event)


@dataclass
class Channel:
    """Messages from one rank to another, in order."""

    messages: list[Sent] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    receives: int = 0


class Delivery:
    """A receive. The message lands when it is waited for; until then its buffer holds noise."""

    def __init__(self, channel: Channel, buffer: Tensor):
        self._channel = channel
        self._buffer = buffer
        self._index = channel.receives
        channel.receives += 1
        # As a network may write at any time from now on.
        buffer.random_(0, 256)

    def count_from_now(self) -> None:
        """Times are not counted."""

    def wait(self) -> None:
        messages = self._channel.messages
        with self._channel.changed:
            assert self._channel.changed.wait_for(lambda: len(messages) > self._index, PATIENCE_S), "nothing was sent"
        message = messages[self._index]
        assert torch.equal(message.buffer, message.content), "a buffer was written before its message was received"
        assert message.content.shape == self._buffer.shape, "a message met a receive of another size"
        self._buffer.copy_(message.content)
        message.received.set()


class Departure:
    """A send."""

    def __init__(self, message: Sent):
        self._message = message

    def count_from_now(self) -> None:
        """Times are not counted."""

    def wait(self) -> None:
        assert self._message.received.wait(PATIENCE_S), "nobody received a message"


class ThreadComm:
    """What attention methods use of a `Communicator`."""

    def __init__(self, rank: int, channels: dict[tuple[str, int, int], Channel], size: int):
        self.mesh = SimpleNamespace(cp_rank=rank, cp_size=size, rank=rank)
        self.ledger = Ledger()
        self.log: list[tuple[str, int | None]] = []
        self._channels = channels
        self._size = size

    def send(self, buffer: Tensor, destination: int, *, operation: str, layer: int | None) -> Departure:
        """As `Communicator.send`."""
        assert buffer.is_contiguous()
        self.log.append(("send", layer))
        self.ledger.sent(operation, layer, buffer.numel())
        channel = self._channels[operation, self.mesh.cp_rank, destination]
        message = Sent(buffer, buffer.clone())
        with channel.changed:
            channel.messages.append(message)
            channel.changed.notify_all()
        return Departure(message)

    def post_receive(self, buffer: Tensor, source: int, *, operation: str, layer: int | None) -> Delivery:
        """As `Communicator.post_receive`."""
        self.log.append(("receive", layer))
        return Delivery(self._channels[operation, source, self.mesh.cp_rank], buffer)

    def shift(
        self, send: Tensor, receive: Tensor, *, operation: str, layer: int | None, steps: tuple[int, int] = (1, -1)
    ) -> Any:
        """As `Communicator.shift`."""
        following, previous = ((self.mesh.cp_rank + step) % self._size for step in steps)
        coming = self.post_receive(receive, previous, operation=operation, layer=layer)
        going = self.send(send, following, operation=operation, layer=layer)
        return SimpleNamespace(wait=lambda: (coming.wait(), going.wait()))


def on_threads(size: int, work: Callable[[ThreadComm], T]) -> list[T]:
    """What every rank's work comes to; the first error of any rank is raised."""
    operations = ("runahead", "pass_kv")
    channels = {
        (name, source, target): Channel() for name in operations for source in range(size) for target in range(size)
    }
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                found[rank] = work(ThreadComm(rank, channels, size))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(size)]
