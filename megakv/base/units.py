"""Sizes as people read them."""

from __future__ import annotations


def in_units(nbytes: float) -> str:
    """A size for people, such as ``1.50 GiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"
