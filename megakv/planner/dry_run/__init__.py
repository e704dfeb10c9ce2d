"""A run without weights, accelerators or peers: every rank's share on the meta device, checked and added up."""

from megakv.planner.dry_run.run import DryRun, VirtualRank, dry_run

__all__ = ["DryRun", "VirtualRank", "dry_run"]
