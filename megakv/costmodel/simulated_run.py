"""A simulated run as the report of a real one: the same timeline, trace and tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megakv.costmodel.simulation import Schedule
from megakv.costmodel.simulation_program import Task
from megakv.tracking.machine import version_info
from megakv.tracking.measurements import Event, Traffic
from megakv.tracking.report import RankReport, RunReport


@dataclass(frozen=True)
class SimulatedRanks:
    cp_size: int
    tp_size: int
    hosts: Sequence[str]  # Per rank.
    tokens: Sequence[int]  # Per rank.
    kv_bytes: Sequence[int]
    peak_bytes: Sequence[int]


@dataclass
class _Count:
    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


@dataclass
class _Rank:
    events: list[Event] = field(default_factory=list)
    counts: dict[tuple[str, int | None], _Count] = field(default_factory=lambda: defaultdict(_Count))
    computed: float = 0.0

    def transfer(self, task: Task, start: float, end: float, *, sends: bool) -> None:
        self.events.append(Event(task.name, "communication", start, end, task.layer))
        count = self.counts[task.name, task.layer]
        count.seconds += end - start
        if sends:
            count.calls += 1
            count.nbytes += task.nbytes

    def compute(self, task: Task, start: float, end: float, cause: Task | None) -> None:
        """Count a computation, and the time since the one before, in which the rank stood still."""
        if cause is not None and start > self.computed:
            self.events.append(Event(cause.name, "wait", self.computed, start, task.layer))
            if cause.kind == "communication":
                self.counts[cause.name, cause.layer].exposed += start - self.computed
        if end > start:
            self.events.append(Event(task.name, "compute", start, end, task.layer))
        self.computed = end


def simulated_report(schedule: Schedule, ranks: SimulatedRanks, **values: Any) -> RunReport:
    """The report of a run that took place on paper; a rank waits for what ended last before its next computation."""
    found = [_Rank() for _ in ranks.tokens]
    causes = _causes(schedule)
    for index in sorted(range(len(schedule.tasks)), key=lambda index: (schedule.starts[index], index)):
        task, start, end = schedule.tasks[index], schedule.starts[index], schedule.ends[index]
        if task.kind == "compute":
            found[task.rank].compute(task, start, end, causes[index])
            continue
        for rank in task.ends:
            found[rank].transfer(task, start, end, sends=rank == task.rank)
    return RunReport(
        mesh={"cp": ranks.cp_size, "tp": ranks.tp_size},
        prompt_tokens=sum(ranks.tokens) // ranks.tp_size,
        ranks=[_rank_report(rank, each, ranks) for rank, each in enumerate(found)],
        versions=version_info(),
        **values,
    )


def _causes(schedule: Schedule) -> list[Task | None]:
    """Per task, the last to end of those that it waited for."""
    last: list[int | None] = [None] * len(schedule.tasks)
    pairs = [(index, other) for index, task in enumerate(schedule.tasks) for other in task.after]
    for index, other in [*pairs, *schedule.waits]:
        known = last[index]
        if known is None or schedule.ends[other] > schedule.ends[known]:
            last[index] = other
    return [None if other is None else schedule.tasks[other] for other in last]


def _rank_report(rank: int, found: _Rank, ranks: SimulatedRanks) -> RankReport:
    counts = sorted(found.counts.items(), key=lambda item: (item[0][0], item[0][1] is None, item[0][1] or 0))
    # A receive counts from when it was posted, so that no wait for it is longer.
    traffic = [
        Traffic(name, layer, count.calls, count.nbytes, max(count.seconds, count.exposed), count.exposed)
        for (name, layer), count in counts
    ]
    return RankReport(
        rank=rank,
        host=ranks.hosts[rank],
        cp_rank=rank // ranks.tp_size,
        tp_rank=rank % ranks.tp_size,
        tokens=ranks.tokens[rank],
        kv_bytes=ranks.kv_bytes[rank],
        peak_bytes=ranks.peak_bytes[rank],
        traffic=traffic,
        events=sorted(found.events, key=lambda event: event.start),
    )
