"""What ranks do together, as cases to be timed: the ring's exchange, alone and under attention, and the collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megakv.costmodel.curves import Curve
from megakv.costmodel.stopwatch import Cases
from megakv.distributed.comm import Communicator
from megakv.planner.measure.kernels import curve

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


def ring_curves(
    cases: Cases, comm: Communicator, *, bandwidth: float, longest_s: float
) -> dict[str, Callable[[], Curve]]:
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
        return lambda: comm.all_gather(piece, operation=OPERATION, layer=None)

    fewer = _sizes(bandwidth, longest_s / COLLECTIVE_PATIENCE)
    return {
        "exchange": curve(cases, _sizes(bandwidth, longest_s), partial(exchange, comm)),
        "all_to_all": curve(cases, fewer, scattering),
        "all_gather": curve(cases, fewer, gathering),
    }


def summing(comm: Communicator, size: int) -> Callable[[], object]:
    tensor = torch.zeros(max(1, size // torch.float32.itemsize), device=comm.mesh.device)
    return lambda: comm.all_reduce(tensor, "tp", operation=OPERATION, layer=None)


def sum_curve(cases: Cases, comm: Communicator, *, bandwidth: float, longest_s: float) -> Callable[[], Curve]:
    return curve(cases, _sizes(bandwidth, longest_s / COLLECTIVE_PATIENCE), partial(summing, comm))


def overlap(
    cases: Cases,
    comm: Communicator,
    compute: Callable[[], object],
    *,
    unit_s: float,
    bandwidth: float,
    longest_s: float,
) -> Callable[[], dict[str, float]]:
    """How badly an exchange and attention share the processor: what the shorter adds to the longer one's time.

    compute: a call of `unit_s` seconds.
    bandwidth: of the exchange, about, which takes no longer than `longest_s`.
    """
    # Long enough for the shorter computation to be several units.
    wanted_s = max(10 * unit_s, LEAST_OVERLAP_BYTES / bandwidth)
    transfer_s = max(LEAST_OVERLAP_S, min(wanted_s, longest_s))
    fewer = max(1, round(SHORTER * transfer_s / unit_s))
    more = max(fewer + 1, round(transfer_s / SHORTER / unit_s))
    size = max(1, int(transfer_s * bandwidth))
    send, receive = _bytes(comm, size), _bytes(comm, size)

    def computing(units: int) -> None:
        for _ in range(units):
            compute()

    def both(units: int) -> None:
        transfer = comm.shift(send, receive, operation=OPERATION, layer=None)
        computing(units)
        transfer.wait()

    alone = cases.add(partial(both, 0))
    short, beside_short, long, beside_long = (
        cases.add(partial(call, units)) for units in (fewer, more) for call in (computing, both)
    )

    def fields() -> dict[str, float]:
        shares = (
            _share(beside_long.seconds - long.seconds, alone.seconds),
            _share(beside_short.seconds - alone.seconds, short.seconds),
        )
        if comm.mesh.device.type == "cpu":
            shares = fair(*shares)
        return {"exposed_transfer": shares[0], "exposed_compute": shares[1], "straggle": long.straggle}

    return fields


def fair(transfer: float, compute: float) -> tuple[float, float]:
    """Exposed parts with which neither goes at less than half speed: a processor gives two threads equal shares."""
    return min(transfer, 1 / (2 - compute)), min(compute, 1 / (2 - transfer))


def _share(added: float, own: float) -> float:
    return min(1.0, max(0.0, added / own))
