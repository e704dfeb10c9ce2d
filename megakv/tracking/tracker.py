"""The tracker: a run's configuration, metrics and report to W&B, CSV, JSON and a picture."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm
import torch
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster

from megakv.errors import MegaKVError
from megakv.tracking.config import TrackingConfig, WandbTrackingConfig
from megakv.tracking.files import write_whole
from megakv.tracking.offload_figure import draw_offload
from megakv.tracking.report import RunReport, report_to_json
from megakv.tracking.tables import Table, by_layer, comparison, operations, report_tables
from megakv.tracking.timeline import draw_timeline
from megakv.tracking.wandb_run import WandbRunMonitor, check_wandb_installed

logger = logging.getLogger(__name__)


class Tracker:
    """Writes what ``megakv.tracking`` asks for. Build one on every rank; only rank 0 writes.

    W&B and CSV go through deepspeed's monitor, which asks ``deepspeed.comm`` for the rank. An engine has set that up
    long before. In a plain Python process without any process group, and only if W&B or CSV is enabled, the tracker
    makes a group of this one process (gloo, no network): so make the tracker after the engine, not before.

    Raises ValueError if W&B is enabled but not installed (on every rank), or a folder cannot be made (on rank 0).
    """

    def __init__(self, config: TrackingConfig, run_config: dict[str, Any], rank: int):
        self._config = config
        self._step = 0
        self._master: MonitorMaster | None = None
        self._wandb: WandbRunMonitor | None = None
        check_wandb_installed(config.wandb)
        if rank != 0:
            # Nothing is written here: every method below finds nothing to do.
            self._config = TrackingConfig()
            return
        self._make_folders()
        if not (config.wandb.enabled or config.csv.enabled):
            return
        _ensure_process_group()
        self._master = MonitorMaster(get_monitor_config({"csv_monitor": config.csv.model_dump()}))
        if config.csv.enabled:
            # deepspeed writes a header once per process; a second run of the same job must not write it again.
            present = Path(config.csv.output_path, config.csv.job_name).glob("*.csv")
            self._master.csv_monitor.filenames.extend(path.stem for path in present)
        if config.wandb.enabled:
            self._wandb = self._master.wandb_monitor = WandbRunMonitor(config.wandb, run_config)

    @property
    def wandb_directory(self) -> Path | None:
        """Folder of the W&B run, for ``wandb sync``; ``None`` on other ranks and without W&B."""
        return self._wandb.directory if self._wandb else None

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log metrics. W&B drops steps smaller than one it has seen."""
        self._step = max(self._step, step)
        if self._master is None:
            return
        try:
            self._master.write_events([(name, value, step) for name, value in metrics.items()])
        except OSError as error:
            # Of the two only CSV can raise it; a full disk must not take a run's answer with it.
            self._master.csv_monitor = None
            logger.warning("megakv.tracking.csv: cannot write, no more metrics go to CSV: %s", error)

    def log_report(self, report: RunReport) -> None:
        """Write the run's report: its scalars, tables and timeline to the monitors, and the JSON and PNG files.

        Raises MegaKVError if the JSON file or the picture cannot be written.
        """
        self.log(report.scalars(), self._step)
        config = self._config
        if config.json_path is not None:
            _write("json", config.json_path, lambda path: write_whole(path, report_to_json(report).encode()))
        if config.timeline is not None:
            _write("timeline", config.timeline, lambda path: draw_timeline(report, path))
        if self._wandb is not None and self._wandb.enabled:
            self._wandb.log_tables(_tables(report))
            self._wandb.draw("timeline", lambda path: draw_timeline(report, path))
            if any(rank.offload for rank in report.ranks):
                self._wandb.draw("offload", lambda path: draw_offload(report, path))

    def close(self) -> None:
        """Finish the W&B run. Nothing may be logged after it."""
        if self._wandb is not None:
            self._wandb.close()
        self._master = self._wandb = None

    def _make_folders(self) -> None:
        """Find out now, not after an hour of prefill, that a result cannot be written."""
        config = self._config
        folders = {
            "csv.output_path": Path(config.csv.output_path, config.csv.job_name) if config.csv.enabled else None,
            "json": Path(config.json_path).parent if config.json_path else None,
            "timeline": Path(config.timeline).parent if config.timeline else None,
        }
        for setting, folder in folders.items():
            if folder is None:
                continue
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"megakv.tracking.{setting}: the folder {folder} cannot be made ({error.strerror}); "
                    "give a path that this user can write to"
                ) from error


def _write(setting: str, path: str, write: Callable[[str], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise MegaKVError(f"megakv.tracking.{setting}: cannot write {path}: {error}") from error


def log_runs(runs: Sequence[tuple[str, RunReport]], config: WandbTrackingConfig) -> Path:
    """One W&B run about several: metrics side by side, tables and timelines; returns its folder, for ``wandb sync``."""
    check_wandb_installed(config)
    tables = {"comparison": comparison([report for _, report in runs], [name for name, _ in runs])}
    for name, report in runs:
        tables |= {f"{name}/{key}": table for key, table in _tables(report).items()}
    run = WandbRunMonitor(config, {name: report.config for name, report in runs})
    run.log_tables(tables)
    for name, report in runs:
        run.draw(f"{name}/timeline", partial(draw_timeline, report))
    directory = run.directory
    run.close()
    if directory is None:
        raise MegaKVError("W&B could not be written; the warning above says why")
    return directory


def _tables(report: RunReport) -> dict[str, Table]:
    """What W&B shows: communication by rank and layer, the rest as on the HTML page."""
    return {**report_tables(report), "communication": by_layer(report), "operations": operations(report)}


def _ensure_process_group() -> None:
    """Let ``deepspeed.comm`` know its rank, in a plain process by a group of one."""
    if deepspeed.comm.is_initialized():
        return
    if not torch.distributed.is_initialized():
        # In memory: no port, no launcher, no environment variables.
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.comm.init_distributed(auto_mpi_discovery=False, verbose=False)
