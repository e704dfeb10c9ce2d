"""Seconds of the sums that tensor parallelism needs: two all-reduces a layer (context parallelism, Table 2)."""

from __future__ import annotations

import math

from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import HardwareProfile

SUMS = 2
"""All-reduces of a layer."""


def all_reduce_seconds(profile: HardwareProfile, nbytes: float, ranks: int, *, shared_memory: bool = False) -> float:
    """Seconds of summing a tensor over ranks: as they were measured, if they were.

    Worked out, over several hosts each rank first sums its part inside its host, then with the same part of the others,
    each over its own link, and gathers inside again; large tensors go in pieces, so that both kinds of links are busy
    at once.

    profile: one measured on several hosts does not know the links inside them: nothing is counted then.
    nbytes: of the tensor.
    ranks: neighbours: they fill hosts one by one.
    shared_memory: whether DeepSpeed's shared-memory operation sums. Where that was not measured, other sums stand in
        for it.
    """
    if ranks < 2 or nbytes <= 0:
        return 0.0
    measured = profile.sum_times(ranks, shared_memory=shared_memory) or profile.sum_times(ranks)
    if measured is not None:
        return measured.seconds.at(nbytes) + measured.wait_s
    inside = profile.exchange_inside
    if inside is None and profile.fingerprint.hosts == 1:
        inside = profile.exchange
    if inside is None:
        return 0.0
    local = min(ranks, profile.devices_per_host or ranks)
    hosts = -(-ranks // local)
    near, near_wait = _summed(inside, nbytes, local)
    far, far_wait = _summed(profile.exchange_collective or profile.exchange, nbytes / local, hosts)
    return max(near + far_wait, far + near_wait)


def _summed(link: Curve, nbytes: float, ranks: int) -> tuple[float, float]:
    """Seconds over one kind of link, and what of them its latency alone takes.

    Scattering the sums and gathering them, either in a ring, or by exchanging ever smaller halves: twice the logarithm
    of messages in place of twice the number of ranks, but each at once to one other rank. The faster one counts.
    """
    if ranks < 2:
        return 0.0, 0.0
    ring = [nbytes / ranks] * (ranks - 1)
    halves = [nbytes / 2 ** (level + 1) for level in range(math.ceil(math.log2(ranks)))]
    return min((2 * sum(map(link.at, sizes)), 2 * len(sizes) * link.latency) for sizes in (ring, halves))


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """What each rank sends in such a ring: its parts twice, once as sums under way and once as sums."""
    return 2 * (ranks - 1) * nbytes // ranks if ranks > 1 else 0
