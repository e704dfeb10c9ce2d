"""Optional packages: which extra of the installation brings them, and a message that says so where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from megakv.base.errors import MegaKVError

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
