"""What compression kept of a sequence in one layer, off the accelerator."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from megakv.distributed.sharding import IntArray
from megakv.fairkv.pages import Body, RaggedBody, streamed
from megakv.offload.link import OUTGOING, Link, Move, Transfer
from megakv.offload.pages import PagedRows, PagePool
from megakv.tensor_files import StreamedTensor


class BodyEngine(Protocol):
    """What a body asks of the engine that it belongs to (see `Offloader`)."""

    link: Link
    pool: PagePool
    device: torch.device
    outgoing: deque[Transfer]


class TieredBody(Body):
    """Written once into pages of host memory or of the disk; its index stays with the layer's store.

    Sequences and sessions that share it hold the same object: its pages are given back with the last of them.
    """

    def __init__(self, body: RaggedBody, layer: int, engine: BodyEngine):
        super().__init__(body.index)
        self.key_dim, self.value_dim, self.dtype = body.key_dim, body.value_dim, body.block.dtype
        self._layer, self._engine = layer, engine
        self._rows = PagedRows(engine.pool, body.block.shape[1], self.dtype, layer=layer)
        engine.outgoing.append(engine.link.start("out", self._rows.append(body.block)))
        # Until it has left, a body takes its place on the accelerator.
        while len(engine.outgoing) > OUTGOING:
            engine.outgoing.popleft().settle()

    @property
    def tokens(self) -> int:
        """Rows of its block, which are as many as its tokens."""
        return self._rows.length

    @property
    def width(self) -> int:
        """Elements of a row of its block."""
        return self._rows.width

    @property
    def in_memory(self) -> int:
        """Leading rows that do not lie on disk."""
        return self._rows.in_memory()

    @property
    def page_bytes(self) -> int:
        """Bytes of its pages."""
        return self._rows.nbytes

    def moves(self, block: Tensor) -> list[Move]:
        """Copies of all of it to ``[n, D + Dv]`` on the accelerator."""
        return self._rows.moves(0, block)

    def within(self, block: Tensor) -> RaggedBody:
        """The body in a block that it was, or is being, copied to."""
        return RaggedBody(self.index, block, self.key_dim)

    def here(self) -> RaggedBody:
        block = torch.empty((self.tokens, self.width), dtype=self.dtype, device=self._engine.device)
        self._engine.link.start("in", self.moves(block)).wait()
        return self.within(block)

    def below(self, row: int) -> Body | None:
        return self if self.index.last_row < row else self.here().below(row)

    def saved(self, slots: IntArray) -> dict[str, StreamedTensor]:
        """From where it lies, without the accelerator."""
        return streamed(self.index, slots, (self.key_dim, self.value_dim), self.dtype, self.on_host)

    def on_host(self) -> RaggedBody:
        """Where it lies; copied where that is on disk, or not in one piece."""
        runs = [run for _, run in self._rows.runs_in_memory(self.tokens)]
        return self.within(runs[0] if len(runs) == 1 else torch.cat(runs))

    def nbytes(self) -> int:
        return self._rows.nbytes + self.index.nbytes()
