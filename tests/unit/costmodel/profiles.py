"""Profiles of imagined machines, simple enough to predict by hand."""

from typing import Any

from megakv.costmodel.curves import AttentionTable, Curve
from megakv.costmodel.hardware import Fingerprint, HardwareProfile

TINY = 1e-15


def fingerprint(**changes: Any) -> Fingerprint:
    values = {
        "processor": "an imagined one",
        "accelerator": "cpu",
        "cores": 4,
        "threads": 1,
        "hosts": 1,
        "ranks": 2,
        "torch_version": "2.13.0",
        "dtype": "float32",
    }
    return Fingerprint(**{**values, **changes})


def pair_table(
    seconds_per_pair: float, *, kernel: str = "flash", head_dim: int = 64, heads: int = 8, group: int = 1
) -> AttentionTable:
    """A kernel whose time is proportional to heads and visible pairs."""
    rows = keys = (1.0, 1024.0)
    return AttentionTable(
        kernel=kernel,
        head_dim=head_dim,
        heads=heads,
        group=group,
        rows=rows,
        keys=keys,
        seconds=tuple(tuple(seconds_per_pair * heads * r * k for k in keys) for r in rows),
        # Half of a square is hidden.
        causal=Curve(sizes=(1.0, 1e6), seconds=(seconds_per_pair * heads / 2, seconds_per_pair * heads / 2 * 1e6)),
    )


def free() -> Curve:
    """What costs nothing to speak of."""
    return Curve(sizes=(1.0, 2.0), seconds=(TINY, 2 * TINY))


def without_links(profile: HardwareProfile) -> HardwareProfile:
    """The same machine with links that take no time: "KVR-S without any communication" is a chain on it."""
    instant = dict.fromkeys(("exchange", "all_to_all", "all_gather"), Curve.instant())
    return profile.model_copy(update={**instant, "exposed_transfer": 0.0, "exposed_compute": 0.0})


def ideal(
    *,
    seconds_per_pair: float = 1e-9,
    exchange: Curve | None = None,
    collective: Curve | None = None,
    exposed: tuple[float, float] = (0.0, 0.0),
    **changes: Any,
) -> HardwareProfile:
    """A machine that only takes time for attention and for its links."""
    values: dict[str, Any] = {
        "fingerprint": fingerprint(),
        "ring_size": 2,
        "attention": (pair_table(seconds_per_pair),),
        "matmul": free(),
        "copy_bytes": free(),
        "copy_fresh": free(),
        "merge": free(),
        "combine": free(),
        "exchange": exchange or free(),
        "exposed_transfer": exposed[0],
        "exposed_compute": exposed[1],
        "straggle": 0.0,
        "all_to_all": collective or free(),
        "all_gather": collective or free(),
        "step_overhead_s": {},
    }
    return HardwareProfile(**{**values, **changes})
