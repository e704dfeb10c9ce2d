"""What ranks do together, as cases to be timed: the ring's exchange, alone and under attention, and the collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megakv.costmodel.measure.kernels import CurveCases, TableCases
from megakv.costmodel.measure.stopwatch import Cases, Times
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
    send, receive = _bytes(comm, size), _bytes(comm, size)
    return lambda: comm.shift(send, receive, operation=OPERATION, layer=None).wait()


def ring_curves(comm: Communicator, *, bandwidth: float, longest_s: float) -> dict[str, CurveCases]:
    """Curves of what the ranks of a ring do together with nothing else running, by field of the profile.

    The ring's step is over the bytes of its messages; the collectives are over the bytes that a rank sends to others.
    No call takes longer than `longest_s`, about.
    """
    others, device = comm.mesh.cp_size - 1, comm.mesh.device

    def scattering(size: int) -> Callable[[], object]:
        counts = [max(1, size // others // torch.float32.itemsize)] * (others + 1)
        send = torch.zeros(sum(counts), device=device)
        return lambda: comm.cp_all_to_all(send, counts, counts, operation=OPERATION, layer=None)

    def gathering(size: int) -> Callable[[], object]:
        piece = _bytes(comm, max(1, size // others))
        return lambda: comm.cp_all_gather(piece, operation=OPERATION, layer=None)

    fewer = _sizes(bandwidth, longest_s / COLLECTIVE_PATIENCE)
    return {
        "exchange": CurveCases("exchange", _sizes(bandwidth, longest_s), partial(exchange, comm)),
        "all_to_all": CurveCases("all to all", fewer, scattering),
        "all_gather": CurveCases("all gather", fewer, gathering),
    }


def sum_name(comm: Communicator) -> tuple[str, int, bool]:
    """What tells the sums over one mesh's tensor-parallel ranks from those over another's."""
    return "sum", comm.mesh.tp_size, comm.mesh.shared_memory


def summing(comm: Communicator, size: int) -> Callable[[], object]:
    tensor = torch.zeros(max(1, size // torch.float32.itemsize), device=comm.mesh.device)
    return lambda: comm.tp_all_reduce(tensor, operation=OPERATION)


def sum_cases(comm: Communicator, *, bandwidth: float, longest_s: float) -> CurveCases:
    sizes = _sizes(bandwidth, longest_s / COLLECTIVE_PATIENCE)
    return CurveCases(sum_name(comm), sizes, partial(summing, comm))


@dataclass
class OverlapCases:
    """How badly an exchange and attention share the processor: what the shorter adds to the longer one's time."""

    comm: Communicator
    kernels: TableCases  # Whose kernel computes.
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

    def add(self, cases: Cases) -> None:
        comm = self.comm
        size = max(1, int(self._transfer_s * self.bandwidth))
        send, receive = _bytes(comm, size), _bytes(comm, size)

        def both(units: int) -> None:
            transfer = comm.shift(send, receive, operation=OPERATION, layer=None)
            self._compute(units)
            transfer.wait()

        cases.add("overlap", 0, True, call=partial(both, 0))
        for units in self._units:
            cases.add("overlap", units, False, call=partial(self._compute, units))
            cases.add("overlap", units, True, call=partial(both, units))

    def fields(self, times: Times) -> dict[str, float]:
        fewer, more = self._units
        alone = times["overlap", 0, True]
        added_transfer = times["overlap", more, True] - times["overlap", more, False]
        added_compute = times["overlap", fewer, True] - alone
        shares = _share(added_transfer, alone), _share(added_compute, times["overlap", fewer, False])
        if self.comm.mesh.device.type == "cpu":
            shares = fair(*shares)
        straggle = times.straggle(("overlap", more, False))
        return {"exposed_transfer": shares[0], "exposed_compute": shares[1], "straggle": straggle}


def fair(transfer: float, compute: float) -> tuple[float, float]:
    """Exposed parts with which neither goes at less than half speed: a processor gives two threads equal shares."""
    return min(transfer, 1 / (2 - compute)), min(compute, 1 / (2 - transfer))


def _share(added: float, own: float) -> float:
    return min(1.0, max(0.0, added / own))
