"""What no chain can undercut: lower bounds of TTFT on p ranks (KV-Runahead, Sections 3 and 5)."""

from __future__ import annotations

from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import HardwareProfile


def dense_bound(single_s: float, ranks: int) -> float:
    """Equation 3: ``TTFT*(p) = alpha C^2 (p + 1) / (2 p^2)`` with ``alpha C^2 = TTFT(1)``.

    For attention that computes masked scores too, on one rank the whole square: p ranks cover the lower triangle by p
    rectangles and leave out what lies above, so that the speed-up can exceed p.
    """
    return single_s * (ranks + 1) / (2 * ranks**2)


def causal_bound(single_s: float, ranks: int) -> float:
    """``TTFT(1) / p``, for kernels that skip masked scores: all ranks work all the time, and on nothing twice."""
    return single_s / ranks


def without_links(profile: HardwareProfile) -> HardwareProfile:
    """The same machine with links that take no time: "KVR-S without any communication" is a chain on it."""
    instant = Curve.instant()
    return profile.model_copy(
        update={
            "exchange": instant,
            "all_to_all": instant,
            "all_gather": instant,
            "exposed_transfer": 0.0,
            "exposed_compute": 0.0,
        }
    )
