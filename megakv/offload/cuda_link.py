"""The link of a CUDA device: a stream for each direction, ordered against computation by events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megakv.errors import MegaKVError
from megakv.offload.link import Direction, MemoryRows, Move, Ticket, Traffic


class _CudaTicket:
    """A transfer of a `CudaLink`."""

    def __init__(self, event: Any, nbytes: int):
        self.nbytes = nbytes
        self._event = event

    @property
    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def settle(self) -> None:
        self._event.synchronize()


class CudaLink:
    """The link of a CUDA device: one stream for each direction, ordered against computation by events.

    Parameters
    ----------
    device : torch.device
    """

    emulated = False

    def __init__(self, device: torch.device):
        self._device = device
        self.traffic: dict[Direction, Traffic] = {"in": Traffic(), "out": Traffic()}
        self._streams: dict[Direction, Any] = {name: torch.cuda.Stream(device) for name in self.traffic}

    def start(self, direction: Direction, moves: Sequence[Move], after: Sequence[Ticket] = ()) -> Ticket:
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for other in after:
            assert isinstance(other, _CudaTicket)
            stream.wait_event(other._event)
        nbytes = 0
        with torch.cuda.stream(stream):
            for move in moves:
                self._copy(direction, move)
                move.device.record_stream(stream)
                nbytes += move.nbytes
            event = torch.cuda.Event()
            event.record(stream)
        self.traffic[direction].nbytes += nbytes
        self.traffic[direction].transfers += 1
        return _CudaTicket(event, nbytes)

    @staticmethod
    def _copy(direction: Direction, move: Move) -> None:
        if isinstance(move.host, MemoryRows):
            if direction == "in":
                move.device.copy_(move.host.rows, non_blocking=True)
            else:
                move.host.rows.copy_(move.device, non_blocking=True)
            return
        # Files are read and written by the processor: this thread waits for them.
        bounce = torch.empty(move.device.shape, dtype=move.device.dtype)
        try:
            if direction == "in":
                move.host.read_into(bounce)
                move.device.copy_(bounce)
            else:
                bounce.copy_(move.device)
                move.host.write_from(bounce)
        except OSError as error:
            raise MegaKVError(f"a transfer of {move.nbytes} bytes failed: {error}") from error

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
