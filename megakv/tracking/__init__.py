"""What a run measures and where it goes: reports as JSON, metrics in CSV and W&B, a timeline picture, a trace."""

from megakv.tracking.balance import HeadBalance, head_balance
from megakv.tracking.config import CSVTrackingConfig, TrackingConfig, WandbTrackingConfig
from megakv.tracking.machine import machine_info, version_info
from megakv.tracking.memory import peak_memory_bytes, reset_peak_memory
from megakv.tracking.metrics import (
    Event,
    PrefillPlan,
    RankReport,
    RunReport,
    Traffic,
    load_report,
    report_from_json,
    report_to_json,
)
from megakv.tracking.monitor import Tracker, log_runs
from megakv.tracking.offload import OffloadStep
from megakv.tracking.offload_figure import draw_offload
from megakv.tracking.timeline import draw_beside, draw_timeline
from megakv.tracking.trace import write_trace

__all__ = [
    "CSVTrackingConfig",
    "Event",
    "HeadBalance",
    "OffloadStep",
    "PrefillPlan",
    "RankReport",
    "RunReport",
    "Tracker",
    "Traffic",
    "TrackingConfig",
    "WandbTrackingConfig",
    "draw_beside",
    "draw_offload",
    "draw_timeline",
    "head_balance",
    "load_report",
    "log_runs",
    "machine_info",
    "peak_memory_bytes",
    "report_from_json",
    "report_to_json",
    "reset_peak_memory",
    "version_info",
    "write_trace",
]
