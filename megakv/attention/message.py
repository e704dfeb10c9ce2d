"""One fused message per hop: keys, values (or queries) and the coordinates of their tokens in a single buffer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from megakv.attention.method import AttentionCall, KVPart
from megakv.sharding import IntArray, TokenBlock

COORDINATE = np.int32
ALIGNMENT = 8


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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _coordinates(buffer: Tensor, start: int, columns: int, rows: int) -> np.ndarray:
    raw = buffer[start : start + columns * rows * COORDINATE().itemsize].cpu().numpy()
    return raw.view(COORDINATE).reshape(columns, rows)


def _write_coordinates(buffer: Tensor, start: int, columns: list[IntArray]) -> int:
    stacked = np.stack(columns).astype(COORDINATE)
    raw = torch.from_numpy(stacked.view(np.uint8).reshape(-1))
    buffer[start : start + raw.numel()].copy_(raw)
    return raw.numel()


def message_bytes(rows: int, row_bytes: int) -> int:
    """Size of a message of some rows: payload, aligned, then two coordinates of each."""
    return _aligned(rows * row_bytes) + 2 * rows * COORDINATE().itemsize


class KVFormat:
    """Layout of keys and values in messages; every rank knows all sizes from the token table or the layout.

    Parameters
    ----------
    call : AttentionCall
    counts : IntArray, optional
        ``[M, B]`` rows of each sequence in each of M messages; if None, one message for each rank: all it holds.
    """

    def __init__(self, call: AttentionCall, counts: IntArray | None = None):
        self._counts = call.table.counts() if counts is None else counts
        self._heads = call.kv_heads
        self._dims = (call.key_dim, call.value_dim)
        self._dtype = call.q_HLD.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self._heads * sum(self._dims) * self._dtype.itemsize

    def payload_bytes(self, index: int) -> int:
        """Bytes of the keys and values in a message."""
        return int(self._counts[index].sum()) * self.row_bytes

    def header_bytes(self, index: int) -> int:
        """Bytes of the coordinates that travel with them, alignment included."""
        return self.nbytes(index) - self.payload_bytes(index)

    def nbytes(self, index: int) -> int:
        """Size of a message."""
        return message_bytes(int(self._counts[index].sum()), self.row_bytes)

    def pack(self, parts: Iterable[KVPart], buffer: Tensor) -> None:
        """Write parts into a message buffer, sequences ascending."""
        start = 0
        slots, positions = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for part in parts:
            for tensor in (part.k_KSD, part.v_KSD):
                size = tensor.numel() * tensor.element_size()
                buffer[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                start += size
            slots.append(part.slots)
            positions.append(part.positions)
        _write_coordinates(buffer, _aligned(start), [np.concatenate(slots), np.concatenate(positions)])

    def unpack(self, index: int, buffer: Tensor) -> list[KVPart]:
        """The parts of a message, as views of its buffer."""
        counts = self._counts[index]
        coordinates = _coordinates(buffer, _aligned(self.payload_bytes(index)), 2, int(counts.sum()))
        slots, positions = coordinates.astype(np.int64)
        parts: list[KVPart] = []
        start = row = 0
        for sequence, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            tensors = []
            for dim in self._dims:
                size = self._heads * count * dim * self._dtype.itemsize
                flat = buffer[start : start + size].view(self._dtype)
                tensors.append(flat.view(self._heads, count, dim))
                start += size
            rows = slice(row, row + count)
            parts.append(KVPart(sequence, tensors[0], tensors[1], slots[rows], positions[rows]))
            row += count
        return parts


class QueryFormat:
    """Layout of a rank's packed queries in a message."""

    def __init__(self, call: AttentionCall):
        self._tokens = call.queries
        self._shape = (call.q_HLD.shape[0], call.q_HLD.shape[2])
        self._dtype = call.q_HLD.dtype

    def payload_bytes(self, rank: int) -> int:
        """Bytes of a rank's queries."""
        return len(self._tokens[rank]) * self._shape[0] * self._shape[1] * self._dtype.itemsize

    def header_bytes(self, rank: int) -> int:
        """Bytes of the coordinates that travel with them, alignment included."""
        payload = self.payload_bytes(rank)
        return _aligned(payload) - payload + 2 * len(self._tokens[rank]) * COORDINATE().itemsize

    def nbytes(self, rank: int) -> int:
        """Size of a rank's message."""
        return self.payload_bytes(rank) + self.header_bytes(rank)

    def pack(self, q_HLD: Tensor, tokens: TokenBlock, buffer: Tensor) -> None:
        """Write this rank's queries into a message buffer."""
        size = q_HLD.numel() * q_HLD.element_size()
        buffer[:size].view(q_HLD.dtype).view(q_HLD.shape).copy_(q_HLD)
        _write_coordinates(buffer, _aligned(size), [tokens.sequence, tokens.slot])

    def unpack(self, rank: int, buffer: Tensor) -> tuple[Tensor, TokenBlock]:
        """The queries of a rank's message, as a view of its buffer, with their tokens."""
        rows = len(self._tokens[rank])
        size = self.payload_bytes(rank)
        q_HLD = buffer[:size].view(self._dtype).view(self._shape[0], rows, self._shape[1])
        sequence, slot = _coordinates(buffer, _aligned(size), 2, rows).astype(np.int64)
        return q_HLD, TokenBlock(sequence, slot, self._tokens[rank].position, self._tokens[rank].batch)
