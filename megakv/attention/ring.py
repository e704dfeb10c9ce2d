"""The ring that all methods run, and what travels in it.

That is raw keys and values, or queries, of tokens that every rank knows: one buffer is used while the next is on its
way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megakv.attention.method import AttentionCall, KVPart
from megakv.distributed.sharding import TokenBlock


class Scratch:
    """Byte buffers that are reused from layer to layer."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        """A contiguous byte buffer; its earlier content under this name is lost."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < nbytes or buffer.device != device:
            buffer = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return buffer[:nbytes]


class MessageFormat:
    """Messages of known tokens: nothing but rows travels, so nothing has to be read to know whose they are."""

    def __init__(self, tokens: Sequence[TokenBlock], row_bytes: int):
        self.tokens = tokens
        self.row_bytes = row_bytes

    def nbytes(self, index: int) -> int:
        """Size of a message."""
        return len(self.tokens[index]) * self.row_bytes


class KVFormat(MessageFormat):
    """Messages of keys and values, sequence after sequence."""

    def __init__(self, call: AttentionCall, tokens: Sequence[TokenBlock]):
        self._heads = call.kv_heads
        self._dims = (call.key_dim, call.v_KLD.shape[2])
        self._dtype = call.q_HLD.dtype
        super().__init__(tokens, self._heads * sum(self._dims) * self._dtype.itemsize)

    def pack(self, content: Iterable[KVPart], buffer: Tensor) -> None:
        """Write parts into a message buffer, sequences ascending; those of one sequence as one, in their order."""
        rows, start = buffer.view(self._dtype), 0
        for _, group in groupby(content, lambda part: part.sequence):
            parts = list(group)
            count = sum(len(part.slots) for part in parts)
            for name, dim in zip(("k_KSD", "v_KSD"), self._dims, strict=True):
                numel, first = self._heads * count * dim, 0
                place = rows[start : start + numel].view(self._heads, count, dim)
                for part in parts:
                    tensor, last = getattr(part, name), first + len(part.slots)
                    shape = (self._heads, last - first, dim)
                    assert (tensor.shape, tensor.dtype) == (shape, self._dtype), "keys or values of another kind"
                    place[:, first:last] = tensor
                    first = last
                start += numel
        assert start == rows.numel(), "parts of other tokens than the message's"

    def unpack(self, index: int, buffer: Tensor) -> list[KVPart]:
        """The parts of a message, as views of its buffer."""
        tokens, rows, start = self.tokens[index], buffer.view(self._dtype), 0
        parts: list[KVPart] = []
        for sequence in range(tokens.batch):
            run = tokens.run(sequence)
            count = run.stop - run.start
            if not count:
                continue
            found = []
            for dim in self._dims:
                stop = start + self._heads * count * dim
                found.append(rows[start:stop].view(self._heads, count, dim))
                start = stop
            keys, values = found
            parts.append(KVPart(sequence, keys, values, tokens.slot[run], tokens.position[run]))
        return parts


class QueryFormat(MessageFormat):
    """Messages of every rank's packed queries."""

    def __init__(self, call: AttentionCall):
        self._heads, _, self._dim = call.q_HLD.shape
        self._dtype = call.q_HLD.dtype
        super().__init__(call.queries, self._heads * self._dim * self._dtype.itemsize)

    def pack(self, content: Tensor, buffer: Tensor) -> None:
        """Write this rank's queries into a message buffer."""
        buffer.view(self._dtype).view(content.shape).copy_(content)

    def unpack(self, rank: int, buffer: Tensor) -> tuple[Tensor, TokenBlock]:
        """The queries of a rank's message, as a view of its buffer, with their tokens."""
        tokens = self.tokens[rank]
        return buffer.view(self._dtype).view(self._heads, len(tokens), self._dim), tokens


def pass_around(
    call: AttentionCall, messages: KVFormat | QueryFormat, own: Any, scratch: Scratch, *, operation: str
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
