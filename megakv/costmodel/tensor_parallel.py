"""Seconds of the sums that tensor parallelism needs: two all-reduces a layer (context parallelism, Table 2)."""

from __future__ import annotations

from megakv.costmodel.hardware import HardwareProfile


def all_reduce_seconds(profile: HardwareProfile, nbytes: float, ranks: int) -> float:
    """Seconds of summing a tensor over ranks, as rings: scatter the sums, then gather them.

    Over several hosts each rank first sums its part inside its host, then with the same part of the others, each over
    its own link, and gathers inside again.

    Parameters
    ----------
    profile : HardwareProfile
        One measured on several hosts does not know the links inside them: nothing is counted then.
    nbytes : float
        Of the tensor.
    ranks : int
        Neighbours: they fill hosts one by one.
    """
    inside = profile.exchange_inside
    if inside is None and profile.fingerprint.hosts == 1:
        inside = profile.exchange
    if ranks < 2 or nbytes <= 0 or inside is None:
        return 0.0
    local = min(ranks, profile.devices_per_host or ranks)
    hosts = -(-ranks // local)
    seconds = 2 * (local - 1) * inside.at(nbytes / local)
    return seconds + 2 * (hosts - 1) * profile.exchange.at(nbytes / (local * hosts))
