"""What a run measures and where it goes: reports as JSON, metrics in CSV and W&B, a timeline picture, a trace."""

from megakv.tracking.config import CSVTrackingConfig, TrackingConfig, WandbTrackingConfig
from megakv.tracking.machine import machine_info, peak_memory_bytes, reset_peak_memory, version_info
from megakv.tracking.measurements import Event, HeadBalance, OffloadStep, PrefillPlan, Traffic, head_balance
from megakv.tracking.offload_figure import draw_offload
from megakv.tracking.report import RankReport, RunReport, load_report, report_from_json, report_to_json
from megakv.tracking.timeline import draw_beside, draw_timeline, write_trace
from megakv.tracking.tracker import Tracker, log_runs

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
