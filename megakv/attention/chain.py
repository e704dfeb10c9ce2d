"""One rank's place in the KV-Runahead chain: what it sends and forwards, receives posted ahead, and their buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megakv.attention.method import AttentionCall, Transfer
from megakv.attention.ring import KVFormat
from megakv.distributed.sharding import Layout, TokenBlock, pieces

OPERATION = "runahead"
HELD = 2
"""Received messages that a rank holds, or has posted buffers for, until they were attended to."""


@dataclass(frozen=True)
class ChainPlan:
    """The messages of one pass, the same in every layer.

    Rank r sends its own tokens, then those of ranks r-1, r-2, ..., 0, each cut into pieces: the nearest come first,
    since the next rank needs only one hop for them.
    """

    messages: list[TokenBlock]
    """The tokens of each."""
    rows: list[tuple[int, int]]
    """Per message, bounds of its tokens in the packed row of the rank that computes them."""
    own: list[int]
    """Messages that this rank sends first."""
    incoming: list[int]
    """Messages that it receives, in order."""
    sends: bool
    """Whether a rank behind this one wants them."""
    queue: int
    """Messages of the rank that has most: as many may wait for the next rank, beside a layer's own. With those held,
    that is what ring pass-KV has in memory: three shards, where messages are at most half a shard."""

    @classmethod
    def of(cls, layout: Layout, rank: int, chunk_tokens: int) -> ChainPlan:
        """The plan of one rank of a contiguous layout, whose longest message has `chunk_tokens` tokens."""
        rows: list[tuple[int, int]] = []
        messages: list[TokenBlock] = []
        of_rank: list[list[int]] = []
        for block in layout.tokens:
            bounds = pieces(len(block), chunk_tokens)
            of_rank.append(list(range(len(rows), len(rows) + len(bounds))))
            rows += bounds
            messages += [block.take(np.arange(*piece)) for piece in bounds]
        # Behind the last rank that computes or keeps anything, nobody wants the prefix.
        users = [index for index in range(layout.size) if len(layout.tokens[index]) or len(layout.stored[index])]
        end = max(users, default=0)
        incoming = [index for source in reversed(range(rank)) for index in of_rank[source]] if rank <= end else []
        longest = max(len(own) for own in of_rank)
        return cls(messages, rows, of_rank[rank], incoming, sends=rank < end, queue=longest)

    @property
    def buffers(self) -> int:
        """How many messages this rank may have in memory."""
        return (HELD if self.incoming else 0) + (len(self.own) + self.queue if self.sends else 0)


@dataclass
class _Message:
    """A message in a buffer of the pool, under way."""

    buffer: Tensor
    nbytes: int
    transfer: Transfer


class ChainLink:
    """Receives from the rank before and sends to the rank behind, over a bounded pool of buffers.

    A buffer is free again when what it holds was attended to and, where it was sent, has been received. Only when all
    buffers are in use is the oldest send waited for, so sends do not hold up computation.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._made = 0
        self._limit = 0
        # Bytes and layer of messages that no receive is posted for yet.
        self._due: deque[tuple[int, int]] = deque()
        self._posted: deque[_Message] = deque()
        self._sending: deque[_Message] = deque()

    def start_pass(self, plan: ChainPlan) -> None:
        """Make ready for the first layer of a pass, whose messages may be of other sizes and number."""
        while self._sending:
            self._reclaim()
        self._limit = plan.buffers
        spare = max(0, self._made - self._limit)
        del self._free[:spare]
        self._made -= spare

    def start_layer(self, call: AttentionCall, sizes: Sequence[int], following: Sequence[tuple[int, int]]) -> None:
        """Post what can be posted of this layer's receives.

        `sizes` are the bytes of the messages that arrive in this layer, in order; `following` the bytes and layer of
        those that arrive after them, posted ahead as buffers become free.
        """
        posted = len(self._posted)
        assert [message.nbytes for message in self._posted] == list(sizes[:posted]), "receives posted for another layer"
        for message in self._posted:
            message.transfer.count_from_now()
        self._due = deque([*((nbytes, call.layer) for nbytes in sizes[posted:]), *following])
        self._post(call)

    def send_own(self, call: AttentionCall, plan: ChainPlan, messages: KVFormat) -> None:
        """Send what this rank has computed itself."""
        if not plan.sends:
            return
        for index in plan.own:
            nbytes = messages.nbytes(index)
            buffer = self._take(nbytes, call.q_HLD.device)
            messages.pack(call.new_parts(*plan.rows[index]), buffer[:nbytes])
            self._sending.append(self._send(call, messages, index, buffer))

    def arrivals(self, call: AttentionCall, plan: ChainPlan, messages: KVFormat) -> Iterator[tuple[int, Tensor]]:
        """This layer's messages, each sent on the moment it is there: its index in the plan, and its bytes.

        They may be read until the next one is asked for.
        """
        for index in plan.incoming:
            received = self._posted.popleft()
            received.transfer.wait()
            sent = self._send(call, messages, index, received.buffer) if plan.sends else None
            yield index, received.buffer[: received.nbytes]
            if sent is not None:
                self._sending.append(sent)
            else:
                self._free.append(received.buffer)
            self._post(call)

    def _send(self, call: AttentionCall, messages: KVFormat, index: int, buffer: Tensor) -> _Message:
        nbytes = messages.nbytes(index)
        transfer = call.comm.send(buffer[:nbytes], call.rank + 1, operation=OPERATION, layer=call.layer)
        return _Message(buffer, nbytes, transfer)

    def _post(self, call: AttentionCall) -> None:
        while self._due and len(self._posted) < HELD:
            nbytes, layer = self._due.popleft()
            buffer = self._take(nbytes, call.q_HLD.device)
            transfer = call.comm.post_receive(buffer[:nbytes], call.rank - 1, operation=OPERATION, layer=layer)
            self._posted.append(_Message(buffer, nbytes, transfer))

    def _take(self, nbytes: int, device: torch.device) -> Tensor:
        """A buffer of at least that size."""
        if not self._free and self._made >= self._limit:
            self._reclaim()
        buffer = self._free.pop() if self._free else None
        if buffer is None:
            self._made += 1
        if buffer is None or buffer.numel() < nbytes or buffer.device != device:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return buffer

    def _reclaim(self) -> None:
        """Wait for the oldest send."""
        message = self._sending.popleft()
        # It has long been on its way: only what it still takes from now on is a delay.
        message.transfer.count_from_now()
        message.transfer.wait()
        self._free.append(message.buffer)
