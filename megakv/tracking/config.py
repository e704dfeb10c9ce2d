"""The ``"megakv": {"tracking": {...}}`` part of the engine's JSON."""

from pathlib import Path

from pydantic import ConfigDict, Field, field_validator

from megakv.sections import Section


class WandbTrackingConfig(Section):
    """Weights & Biases; offline unless the user is logged in.

    Needs the package ``wandb`` on every rank's machine. `team` is W&B's entity; ``None`` leaves the choice to W&B.
    """

    enabled: bool = False
    project: str = Field("megakv", min_length=1)
    team: str | None = None
    group: str | None = None
    name: str | None = None


class CSVTrackingConfig(Section):
    """One CSV file per metric in ``output_path/job_name``, named as by deepspeed's monitor.

    A second run with the same folder appends to the same files.
    """

    enabled: bool = False
    output_path: str = Field("runs", min_length=1)
    job_name: str = Field("megakv", min_length=1)


class TrackingConfig(Section):
    """Where a run's metrics go. Everything is off by default; only rank 0 writes.

    The file ``"json"`` gets the run's whole report, see `megakv.tracking.report.load_report`; `timeline` is a PNG.
    """

    # Only "json" is a key of the file: the Python name would be a second spelling of it.
    model_config = ConfigDict(populate_by_name=False)

    wandb: WandbTrackingConfig = WandbTrackingConfig()
    csv: CSVTrackingConfig = CSVTrackingConfig()
    json_path: str | None = Field(None, alias="json", min_length=1)
    timeline: str | None = None

    @field_validator("timeline")
    @classmethod
    def _is_png(cls, value: str | None) -> str | None:
        if value is not None and Path(value).suffix.lower() != ".png":
            raise ValueError(f"megakv.tracking.timeline is {value!r}; it must be a path that ends in .png")
        return value
