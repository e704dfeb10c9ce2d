"""What compression kept of a sequence in one layer, off the accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megakv.attention.compiled import Packing, RowTable, Run, laid
from megakv.base.tensor_files import StreamedTensor
from megakv.cache.ragged_body import Body, BodyIndex, RaggedBody, streamed
from megakv.distributed.sharding import IntArray
from megakv.offload.link import Move
from megakv.offload.paged_rows import PagedRows
from megakv.offload.row_format import GroupQuantiser
from megakv.offload.store import StoreEngine


class TieredBody(Body):
    """Written once into pages of host memory or of the disk; its index stays with the layer's store.

    With a `quantiser` each token lies there in few bits, its key before its value. Sequences and sessions that share it
    hold the same object: its pages are given back with the last of them.
    """

    def __init__(self, body: RaggedBody, layer: int, engine: StoreEngine, quantiser: GroupQuantiser | None = None):
        super().__init__(body.index)
        self.key_dim, self.value_dim, self.dtype = body.key_dim, body.value_dim, body.dtype
        self.layer, self.quantiser, self._engine = layer, quantiser, engine
        rows = body.block if quantiser is None else quantiser.pack(torch.cat((body.k_nD, body.v_nD), dim=1))
        self._rows = PagedRows(engine.pool, rows.shape[1], rows.dtype, layer=layer)
        engine.link.start("out", self._rows.append(rows))
        # Until it has left, a body takes its place on the accelerator.
        engine.link.hold_up()

    @property
    def tokens(self) -> int:
        """Rows of its block, which are as many as its tokens."""
        return self._rows.length

    @property
    def width(self) -> int:
        """Elements of a row of its block."""
        return self.key_dim + self.value_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of a row off the accelerator."""
        return self._rows.width * self._rows.dtype.itemsize

    @property
    def in_memory(self) -> int:
        """Leading rows that do not lie on disk."""
        return self._rows.in_memory()

    @property
    def page_bytes(self) -> int:
        """Bytes of its pages."""
        return self._rows.nbytes

    def moves(self, stored: Tensor) -> list[Move]:
        """Copies of all of it, as it is stored, to ``[n, W]`` on the accelerator."""
        return self._rows.moves(0, stored)

    def within(self, block: Tensor) -> RaggedBody:
        """The body in a block that it was, or is being, copied to."""
        return RaggedBody.in_block(self.index, block, self.key_dim)

    def unpack(self, stored: Tensor, body: RaggedBody) -> None:
        """Write the tokens that its bytes stand for."""
        assert self.quantiser is not None
        self.quantiser.unpack(stored, body.k_nD, body.v_nD)

    def unpacked(self, stored: Tensor) -> RaggedBody:
        """The body of its rows, as they are stored."""
        if self.quantiser is None:
            return self.within(stored)
        body = self.within(torch.empty((self.tokens, self.width), dtype=self.dtype, device=stored.device))
        self.unpack(stored, body)
        return body

    def here(self) -> RaggedBody:
        stored = torch.empty((self.tokens, self._rows.width), dtype=self._rows.dtype, device=self._engine.device)
        self._engine.link.start("in", self.moves(stored)).wait()
        return self.unpacked(stored)

    def below(self, row: int) -> Body | None:
        return self if self.index.last_row < row else self.here().below(row)

    def saved(self, slots: IntArray) -> dict[str, StreamedTensor]:
        """From where it lies, without the accelerator."""
        dims = self.key_dim, self.value_dim
        return streamed(self.index, slots, dims, self.dtype, lambda: self.on_host().here())

    def on_host(self) -> RaggedBody | PackedBody:
        """Where it lies; copied where that is on disk, or not in one piece."""
        runs = [run for _, run in self._rows.runs_in_memory(self.tokens)]
        stored = runs[0] if len(runs) == 1 else torch.cat(runs)
        return self.within(stored) if self.quantiser is None else PackedBody(self, stored, self.quantiser.packing)

    def nbytes(self) -> int:
        return self._rows.nbytes + self.index.nbytes()


@dataclass(frozen=True)
class PackedBody:
    """A body on the host in few bits, `stored` as ``[n, nbytes]``, which the compiled kernel attends to as it is."""

    body: TieredBody
    stored: Tensor
    packing: Packing

    @property
    def index(self) -> BodyIndex:
        return self.body.index

    @property
    def key_dim(self) -> int:
        return self.body.key_dim

    @property
    def value_dim(self) -> int:
        return self.body.value_dim

    @property
    def dtype(self) -> torch.dtype:
        return self.body.dtype

    @cached_property
    def runs(self) -> RowTable:
        """As of `RaggedBody`, in bytes."""
        counts, step = self.index.counts, self.stored.stride(0)
        table = np.zeros((len(counts), len(Run._fields)), dtype=np.int64)
        before = self.index.bounds[:-1] * step
        table[:, 0], table[:, 7] = self.stored.data_ptr() + before, laid(self.stored[None])[2] - before
        table[:, 2], table[:, 4] = counts, step
        return RowTable.at(table)

    def here(self) -> RaggedBody:
        return self.body.unpacked(self.stored)
