"""What can be known of a W&B project before anything starts; little is imported for it."""

from __future__ import annotations

import importlib.util

REFUSED = "/\\#?%:"
LONGEST = 128


def checked_project(name: str) -> str:
    """A project's name, as W&B takes it."""
    if not 0 < len(name.strip()) <= LONGEST or set(name) & set(REFUSED):
        raise ValueError(f"allowed: 1 to {LONGEST} characters, none of {' '.join(REFUSED)}")
    return name


def check_installed(setting: str, remedy: str) -> None:
    """Refuse a setting that asks for W&B where it cannot be imported."""
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"{setting}, but the package wandb is not installed: install it (pip install wandb) or {remedy}"
        )


def check_project(project: str | None) -> None:
    """Refuse an argument ``--wandb PROJECT`` that cannot work."""
    if project is not None:
        try:
            checked_project(project)
        except ValueError as error:
            raise ValueError(f"--wandb {project}: {error}") from None
        check_installed(f"--wandb {project} is given", "leave --wandb out")
