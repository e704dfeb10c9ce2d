"""The ``"megakv": {"tracking": {...}}`` part of the engine's JSON."""

import importlib.util
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, field_validator

from megakv.base.sections import Section

REFUSED, LONGEST = "/\\#?%:", 128


def checked_project(name: str) -> str:
    """A project's name, as W&B takes it."""
    if not 0 < len(name.strip()) <= LONGEST or set(name) & set(REFUSED):
        raise ValueError(f"allowed: 1 to {LONGEST} characters, none of {' '.join(REFUSED)}")
    return name


def check_wandb(setting: str, project: str, remedy: str) -> None:
    """Refuse a setting that asks for a W&B project of no such name, or where W&B cannot be imported."""
    try:
        checked_project(project)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"{setting}, but the package wandb is not installed: install it (pip install wandb) or {remedy}"
        )


def check_project(project: str | None) -> None:
    """Refuse an argument ``--wandb PROJECT`` that cannot work."""
    if project is not None:
        check_wandb(f"--wandb {project}", project, "leave --wandb out")


class WandbTrackingConfig(Section):
    """Weights & Biases. Needs the package ``wandb`` on every rank's machine."""

    enabled: bool = False
    """Whether rank 0 logs to Weights & Biases. Offline unless you are logged in."""

    project: Annotated[str, AfterValidator(checked_project)] = "megakv"
    """Project of the run: 1 to 128 characters, none of ``/ \\ # ? % :``."""

    team: str | None = None
    """Entity of the run. ``null`` leaves it to W&B."""

    group: str | None = None
    """Group of the run."""

    name: str | None = None
    """Display name of the run."""


class CSVTrackingConfig(Section):
    """One CSV file per metric in ``output_path/job_name``, named as by deepspeed's monitor."""

    enabled: bool = False
    """Whether rank 0 writes one CSV file per metric."""

    output_path: str = Field("runs", min_length=1)
    """Folder of the job folders."""

    job_name: str = Field("megakv", min_length=1)
    """Folder of this job's files. Later runs append."""


class TrackingConfig(Section):
    """Where a run's metrics go. Everything is off by default; only rank 0 writes."""

    # Only "json" is a key of the file: the Python name would be a second spelling of it.
    model_config = ConfigDict(populate_by_name=False)

    wandb: WandbTrackingConfig = WandbTrackingConfig()
    csv: CSVTrackingConfig = CSVTrackingConfig()

    json_path: str | None = Field(None, alias="json", min_length=1)
    """File for the whole report, which `megakv.tracking.report.load_report` reads: docs/report.md."""

    timeline: str | None = None
    """Picture of compute and communication per rank, a name that ends in ``.png``. It also turns on the recording of
    events."""

    @field_validator("timeline")
    @classmethod
    def _is_png(cls, value: str | None) -> str | None:
        if value is not None and Path(value).suffix.lower() != ".png":
            raise ValueError("allowed: a path that ends in .png")
        return value

    @property
    def records_events(self) -> bool:
        """Whether something draws what ranks compute and wait for."""
        return self.timeline is not None or self.wandb.enabled
