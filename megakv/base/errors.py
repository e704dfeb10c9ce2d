"""The one exception class of MegaKV's own, and what its messages need; wrong values are plain ``ValueError``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class MegaKVError(RuntimeError):
    """A failure at run time that a user can act on: a lost peer, a broken checkpoint, a session past its capacity.

    The message names the setting to change, its value and what would work.

    Attributes
    ----------
    sequences : Tensor, optional
        Prompt and tokens ``[B, S]`` that `generate` had when it failed, so that nothing it found is lost.
    """

    sequences: Tensor | None = None


class PeerLostError(MegaKVError):
    """A peer's process is gone, or it did not answer in time. Any rank may be the one that notices."""


EXTRAS = {
    "serve": ("fastapi", "uvicorn", "openai", "prometheus_client", "llguidance", "scipy"),
    "plan": ("scipy",),
    "report": ("matplotlib",),
    "gguf": ("gguf",),
}
"""Packages of each extra, by the names that they are imported by; ``all`` brings every one."""


def require_extra(extra: str, what: str) -> None:
    """Refuse to begin what needs an extra that is not installed.

    Raises
    ------
    MegaKVError
        If a package is missing: its name, and the command that installs it.
    """
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise MegaKVError(
            f"{what} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install 'megakv[{extra}]', or 'megakv[all]' for everything"
        )


def in_units(nbytes: float) -> str:
    """A size for people, such as ``1.50 GiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"
