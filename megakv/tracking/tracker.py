"""The tracker: a run's configuration, metrics and report to W&B, CSV, JSON and a picture."""

import csv
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megakv.base.errors import MegaKVError
from megakv.base.extras import require_extra
from megakv.tracking.config import TrackingConfig, WandbTrackingConfig
from megakv.tracking.files import check_outputs, drawn, write_whole
from megakv.tracking.offload_figure import draw_offload
from megakv.tracking.report import RunReport, report_to_json
from megakv.tracking.tables import Table, answers, comparison, report_tables
from megakv.tracking.timeline import draw_timelines, has_events
from megakv.tracking.wandb_run import WandbRun, check_wandb_installed

logger = logging.getLogger(__name__)


class Tracker:
    """Writes what ``megakv.tracking`` asks for. Build one on every rank; only rank 0 writes.

    Raises ValueError if W&B is enabled but not installed (on every rank), or a file cannot be written (on rank 0).
    """

    def __init__(self, config: TrackingConfig, run_config: dict[str, Any], rank: int):
        check_wandb_installed(config.wandb)
        # Nothing is written on other ranks: every method below finds nothing to do.
        self._config = config if rank == 0 else TrackingConfig()
        self._step = 0
        self._csv = _csv_folder(self._config)
        check_files(self._config)
        self._wandb = WandbRun(config.wandb, run_config) if self._config.wandb.enabled else None

    @property
    def wandb_directory(self) -> Path | None:
        """Folder of the W&B run, for ``wandb sync``; ``None`` on other ranks and without W&B."""
        return self._wandb.directory if self._wandb else None

    @property
    def wandb_upload(self) -> str | None:
        """The command that uploads an offline W&B run once the tracker is closed; ``None`` where there is no such."""
        return self._wandb.upload if self._wandb else None

    @property
    def written(self) -> dict[str, Path]:
        """By kind, the files and folders that `log_report` writes; none on other ranks."""
        config = self._config
        found = {
            "report": config.json_path,
            "timeline": config.timeline,
            "CSV files": self._csv,
            "W&B run": self.wandb_directory,
        }
        return {kind: Path(path).resolve() for kind, path in found.items() if path is not None}

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics. W&B drops steps smaller than one it has seen."""
        self._step = max(self._step, step)
        if self._wandb is not None:
            self._wandb.log(metrics, step)
        if self._csv is not None:
            try:
                _append(self._csv, metrics, step)
            except OSError as error:
                # A full disk must not take a run's answer with it.
                self._csv = None
                logger.warning("megakv.tracking.csv: cannot write, no more metrics go to CSV: %s", error)

    def log_report(self, report: RunReport) -> None:
        """Write the run's report: its scalars, tables and timeline to the monitors, and the JSON and PNG files.

        A tracker may be given several, one after the other. W&B learns nothing of what was asked and answered.

        Raises MegaKVError if the JSON file or the picture cannot be written.
        """
        self.log(report.scalars(), self._step)
        config = self._config
        if config.json_path is not None:
            _write("json", config.json_path, lambda path: write_whole(path, report_to_json(report).encode()))
        if config.timeline is not None:
            _write("timeline", config.timeline, partial(draw_timelines, [report]))
        if self._wandb is not None:
            pictures = {"timeline": drawn(partial(draw_timelines, [report]))} if has_events(report) else {}
            if any(rank.offload for rank in report.ranks):
                pictures["offload"] = drawn(partial(draw_offload, report))
            self._wandb.describe(_facts(report))
            self._wandb.log({**_tables(report), **pictures}, self._step)
        self._step += 1

    def close(self) -> None:
        """Finish the W&B run. Nothing may be logged after it."""
        if self._wandb is not None:
            self._wandb.close()
        self._csv = self._wandb = None


def check_files(config: TrackingConfig) -> None:
    """Refuse now, not after an hour of prefill, what could not be written."""
    if config.records_events:
        require_extra("report", "a timeline (megakv.tracking.timeline, or W&B)")
    folder = _csv_folder(config)
    files = {
        # A file as there will be several.
        "csv.output_path": None if folder is None else folder / "ttft_s.csv",
        "json": config.json_path,
        "timeline": config.timeline,
    }
    check_outputs({f"megakv.tracking.{name}": path for name, path in files.items()})


def _csv_folder(config: TrackingConfig) -> Path | None:
    return Path(config.csv.output_path, config.csv.job_name) if config.csv.enabled else None


def _write(setting: str, path: str, write: Callable[[str], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise MegaKVError(f"megakv.tracking.{setting}: cannot write {path}: {error}") from error


def log_runs(runs: Sequence[tuple[str, RunReport]], config: WandbTrackingConfig) -> Path:
    """One W&B run about several: metrics side by side, tables and timelines; returns its folder, for ``wandb sync``."""
    check_wandb_installed(config)
    values: dict[str, Table | bytes] = {}
    values["comparison"] = comparison([report for _, report in runs], [name for name, _ in runs])
    for name, report in runs:
        values |= {f"{name}/{key}": table for key, table in _tables(report).items()}
        if has_events(report):
            values[f"{name}/timeline"] = drawn(partial(draw_timelines, [report]))
    run = WandbRun(config, {name: report.config for name, report in runs})
    run.log(values)
    directory = run.directory
    run.close()
    if directory is None:
        raise MegaKVError("W&B could not be written; the warning above says why")
    return directory


def _tables(report: RunReport) -> dict[str, Table]:
    """What W&B shows: the tables of the HTML page, and latencies of every answer."""
    return report_tables(report) | ({"answers": answers(report)} if report.answers else {})


def _facts(report: RunReport) -> dict[str, Any]:
    """Of a report, what belongs to W&B's configuration of the run, beside the engine's own."""
    names = ("model", "mesh", "methods", "machine", "versions")
    settings = {name: value for name, value in report.settings.items() if name != "question"}
    return {**{name: getattr(report, name) for name in names}, "settings": settings}


def _append(folder: Path, metrics: dict[str, float], step: int) -> None:
    """Write a line to the CSV file of each metric, named and headed as deepspeed's monitor does."""
    for name, value in metrics.items():
        with open(folder / f"{name.replace('/', '_').replace(' ', '_')}.csv", "a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(["step", name.rpartition("/")[2]])
            writer.writerow([step, value])
