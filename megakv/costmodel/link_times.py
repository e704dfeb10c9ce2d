"""What ranks do together, as cells to be timed: the ring's exchange, alone and under attention, and the collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megakv.costmodel.curves import Curve
from megakv.costmodel.kernel_times import CurveCells, TableCells
from megakv.costmodel.stopwatch import Battery, Cells, Times
from megakv.distributed.comm import Communicator

MESSAGE_SIZES = (1 << 6, 1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 24, 1 << 26)
COLLECTIVE_PATIENCE = 4
"""Collectives reach a fraction of the exchange's bandwidth; messages are kept that much smaller."""
OPERATION = "profile"
# One unit of the computation that runs beside an exchange: short, so that its length can be chosen finely.
UNIT_ROWS = 64
UNIT_KEYS = 256
SHORTER = 0.6
"""The shorter of the two that overlap takes this part of the longer."""
LEAST_OVERLAP_S = 2e-3
LEAST_OVERLAP_BYTES = 4 << 20
"""Links let bursts of some hundred kilobytes pass at any speed: shorter exchanges than this say nothing of overlap."""


def _bytes(comm: Communicator, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=comm.mesh.device)


def _sizes(bandwidth: float, longest_s: float) -> tuple[int, ...]:
    return tuple(size for size in MESSAGE_SIZES if size in MESSAGE_SIZES[:2] or size <= bandwidth * longest_s)


def exchange(comm: Communicator, size: int) -> Callable[[], object]:
    """One step of the ring with messages of `size` bytes."""
    send, receive = _bytes(comm, size), _bytes(comm, size)
    return lambda: comm.shift(send, receive, operation=OPERATION, layer=None).wait()


def exchange_cells(comm: Communicator, *, bandwidth: float, longest_s: float) -> CurveCells:
    """One step of the ring with nothing else running, over bytes."""
    return CurveCells("exchange", _sizes(bandwidth, longest_s), lambda size: exchange(comm, size))


def all_to_all_cells(comm: Communicator, *, bandwidth: float, longest_s: float) -> CurveCells:
    """All2All with equal pieces, over the bytes that a rank sends to others."""

    def make(size: int) -> Callable[[], object]:
        ranks = comm.mesh.cp_size
        counts = [max(1, size // (ranks - 1) // torch.float32.itemsize)] * ranks
        send = torch.zeros(sum(counts), device=comm.mesh.device)
        return lambda: comm.cp_all_to_all(send, counts, counts, operation=OPERATION, layer=None)

    return CurveCells("all to all", _sizes(bandwidth, longest_s / COLLECTIVE_PATIENCE), make)


def all_gather_cells(comm: Communicator, *, bandwidth: float, longest_s: float) -> CurveCells:
    """All-gather, over the bytes that a rank sends to others."""

    def make(size: int) -> Callable[[], object]:
        piece = _bytes(comm, max(1, size // (comm.mesh.cp_size - 1)))
        return lambda: comm.cp_all_gather(piece, operation=OPERATION, layer=None)

    return CurveCells("all gather", _sizes(bandwidth, longest_s / COLLECTIVE_PATIENCE), make)


def sum_name(comm: Communicator) -> tuple[str, int, bool]:
    """What tells the sums over one mesh's tensor-parallel ranks from those over another's."""
    return "sum", comm.mesh.tp_size, comm.mesh.shared_memory


def summing(comm: Communicator, size: int) -> Callable[[], object]:
    """A sum of so many bytes over tensor-parallel ranks."""
    tensor = torch.zeros(max(1, size // torch.float32.itemsize), device=comm.mesh.device)
    return lambda: comm.tp_all_reduce(tensor, operation=OPERATION)


def sum_cells(comm: Communicator, *, bandwidth: float, longest_s: float) -> CurveCells:
    """Sums over a mesh's tensor-parallel ranks, over bytes."""
    sizes = _sizes(bandwidth, longest_s / COLLECTIVE_PATIENCE)
    return CurveCells(sum_name(comm), sizes, lambda size: summing(comm, size))


class RingCells:
    """What the ranks of a ring do together.

    kernels: whose kernel computes beside an exchange.
    unit_s: seconds of a unit of it, see `OverlapCells`.
    bandwidth: bytes per second of the exchange, about.
    longest_s: no call takes longer than this, about.
    """

    def __init__(self, comm: Communicator, kernels: TableCells, unit_s: float, bandwidth: float, longest_s: float):
        self._step = exchange_cells(comm, bandwidth=bandwidth, longest_s=longest_s)
        self._scatter = all_to_all_cells(comm, bandwidth=bandwidth, longest_s=longest_s)
        self._gather = all_gather_cells(comm, bandwidth=bandwidth, longest_s=longest_s)
        self._overlap = OverlapCells(comm, kernels, unit_s, bandwidth, longest_s)
        self._all: tuple[Cells, ...] = (self._step, self._scatter, self._gather, self._overlap)

    def add(self, battery: Battery) -> None:
        """Put the cells into a battery."""
        for cells in self._all:
            cells.add(battery)

    def fields(self, times: Times) -> dict[str, Any]:
        """Fields of `HardwareProfile`."""
        exposed_transfer, exposed_compute = self._overlap.exposed(times)
        return {
            "exchange": self._step.curve(times),
            "exposed_transfer": exposed_transfer,
            "exposed_compute": exposed_compute,
            "straggle": self._overlap.straggle(times),
            "all_to_all": self._scatter.curve(times),
            "all_gather": self._gather.curve(times),
        }


def no_links() -> dict[str, Any]:
    """The same fields for a rank that is alone: whatever is sent to nobody takes no time."""
    instant = dict.fromkeys(("exchange", "all_to_all", "all_gather"), Curve.instant())
    return {**instant, "exposed_transfer": 0.0, "exposed_compute": 0.0, "straggle": 0.0}


@dataclass
class OverlapCells:
    """How badly an exchange and attention share the processor.

    Both run together twice, once with the one and once with the other as the longer. What the shorter one adds to the
    longer one's own time is the part of it that is not hidden.
    """

    comm: Communicator
    kernels: TableCells  # Whose kernel computes.
    unit_s: float  # Seconds of one call of `UNIT_ROWS` by `UNIT_KEYS`.
    bandwidth: float  # Bytes per second of the exchange, about.
    longest_s: float  # The exchange takes no longer than this, about.
    _units: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        # Long enough for the shorter computation to be several units.
        wanted_s = max(10 * self.unit_s, LEAST_OVERLAP_BYTES / self.bandwidth)
        self._transfer_s = max(LEAST_OVERLAP_S, min(wanted_s, self.longest_s))
        fewer = max(1, round(SHORTER * self._transfer_s / self.unit_s))
        self._units = fewer, max(fewer + 1, round(self._transfer_s / SHORTER / self.unit_s))

    def _compute(self, units: int) -> None:
        for _ in range(units):
            self.kernels.call(UNIT_ROWS, UNIT_KEYS, causal=False)

    def add(self, battery: Battery) -> None:
        """Put the cells into a battery."""
        comm = self.comm
        size = max(1, int(self._transfer_s * self.bandwidth))
        send, receive = _bytes(comm, size), _bytes(comm, size)

        def both(units: int) -> None:
            transfer = comm.shift(send, receive, operation=OPERATION, layer=None)
            self._compute(units)
            transfer.wait()

        battery.add("overlap", 0, True, call=lambda: both(0))
        for units in self._units:
            battery.add("overlap", units, False, call=lambda n=units: self._compute(n))  # type: ignore[misc]
            battery.add("overlap", units, True, call=lambda n=units: both(n))  # type: ignore[misc]

    def exposed(self, times: Times) -> tuple[float, float]:
        """``exposed_transfer`` and ``exposed_compute`` of `HardwareProfile`."""
        fewer, more = self._units
        alone = times["overlap", 0, True]
        added_transfer = times["overlap", more, True] - times["overlap", more, False]
        added_compute = times["overlap", fewer, True] - alone
        shares = _share(added_transfer, alone), _share(added_compute, times["overlap", fewer, False])
        return fair(*shares) if self.comm.mesh.device.type == "cpu" else shares

    def straggle(self, times: Times) -> float:
        """``straggle`` of `HardwareProfile`."""
        return times.straggle(("overlap", self._units[1], False))


def fair(transfer: float, compute: float) -> tuple[float, float]:
    """Exposed parts with which neither goes at less than half speed: a processor gives two threads equal shares."""
    return min(transfer, 1 / (2 - compute)), min(compute, 1 / (2 - transfer))


def _share(added: float, own: float) -> float:
    return min(1.0, max(0.0, added / own))
