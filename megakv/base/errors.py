"""MegaKV's own exceptions, and what their messages need; wrong values are plain ``ValueError``.

Settings that are right each for itself and cannot be had together are refused with the law behind the refusal.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

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
    "quantised": ("compressed_tensors",),
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


Law = Literal["needs", "one", "foreign", "whole", "room", "inputs", "machine"]

LAWS: dict[Law, str] = {
    "needs": "a setting of something has no effect without it, and what is decided by a file's numbers needs the file",
    "one": "of two settings that decide the same thing only one can be obeyed",
    "foreign": "what was measured or made for one machine, mesh, model or method says nothing about another",
    "whole": "ranks and heads are not cut: there are as many parts as share them, and they add up to the whole",
    "room": "what must be kept in any case must have room: a window, a page of every layer, the weights",
    "inputs": "keys and values can be recomputed only on a rank that has all that they were computed from",
    "machine": "a machine has the memory, cores, links and types of numbers that it has",
}
"""Why settings exclude each other. What is refused for another reason is a feature that is missing."""


class CombinationError(ValueError):
    """Settings, right each for itself, that a law excludes together; the message names them and what would work."""

    def __init__(self, law: Law, message: str):
        super().__init__(message)
        self.law: Law = law


def repeated(message: str, *causes: object) -> ValueError:
    """What causes say, in another message: by the law of the first of them that has one."""
    law = next((cause.law for cause in causes if isinstance(cause, CombinationError)), None)
    return ValueError(message) if law is None else CombinationError(law, message)
