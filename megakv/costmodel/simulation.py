"""A discrete-event simulator: tasks that wait for each other and for what they run on.

Closed forms give the time of machines whose ranks and links are all alike. The simulator also knows what they miss: a
slow rank or link, noise, the start of a chain, and two streams on one link. What runs on a processor and what is on its
way to or from it slow each other down by constant factors while both run, as `HardwareProfile.overlapped` has it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.simulation_program import Program, Task


@dataclass(frozen=True)
class Sharing:
    """How much slower a processor and a transfer go beside each other."""

    # Parts of their full speeds while both run; a transfer that concerns two ranks slows each by half of it.
    compute: float = 1.0
    transfer: float = 1.0

    @classmethod
    def of(cls, profile: HardwareProfile) -> Sharing:
        """The constant factors that make `HardwareProfile.overlapped` what it is."""
        late, busy = profile.exposed_transfer, profile.exposed_compute
        if max(late, busy) == 1.0:
            return cls(0.5, 0.5)
        return cls((1 - late) / (1 - late * busy), (1 - busy) / (1 - late * busy))


@dataclass(frozen=True)
class Schedule:
    tasks: Sequence[Task]
    waits: Sequence[tuple[int, int]]  # As in the program.
    ready: list[float]  # Per task, when all that it waits for had ended, when it began and when it ended.
    starts: list[float]
    ends: list[float]

    @property
    def seconds(self) -> float:
        return max(self.ends, default=0.0)


ALONE = Sharing()


def simulate(
    program: Program, sharing: Sharing = ALONE, *, progress: Callable[[int], object] | None = None
) -> Schedule:
    """Run a program; `progress` is told the number of tasks that have ended, now and then."""
    return _Run(program, sharing, progress).schedule()


class _Run:
    """The clock, what is ready, and what runs at which speed."""

    def __init__(self, program: Program, sharing: Sharing, progress: Callable[[int], object] | None):
        self._tasks, self._waits = program.tasks, program.waits
        self._sharing = sharing
        self._shares = sharing != ALONE
        self._progress = progress
        count = len(self._tasks)
        self._missing = [len(task.after) for task in self._tasks]
        self._followers: list[list[int]] = [[] for _ in range(count)]
        for index, task in enumerate(self._tasks):
            for other in task.after:
                self._followers[other].append(index)
        for index, other in program.waits:
            self._missing[index] += 1
            self._followers[other].append(index)
        self._ready, self._starts, self._ends = [0.0] * count, [0.0] * count, [0.0] * count
        self._queues: dict[Hashable, deque[int]] = defaultdict(deque)
        self._serving: dict[Hashable, int] = {}
        # What is left of the tasks that run, as of when, and at which speed.
        self._left: dict[int, tuple[float, float, float]] = {}
        self._due: list[tuple[float, int]] = []
        self._computing: list[int | None] = [None] * program.ranks
        self._moving: list[list[int]] = [[] for _ in range(program.ranks)]

    def schedule(self) -> Schedule:
        for index, missing in enumerate(self._missing):
            if not missing:
                self._enqueue(index, 0.0)
        ended = 0
        while self._due:
            now, index = heapq.heappop(self._due)
            left = self._left.get(index)
            if left is None or left[1] + left[0] / left[2] != now:
                continue  # Its speed changed after this was noted.
            self._finish(index, now)
            ended += 1
            if self._progress is not None and ended % 1024 == 0:
                self._progress(ended)
        assert ended == len(self._tasks), "tasks wait for each other"
        return Schedule(self._tasks, self._waits, self._ready, self._starts, self._ends)

    def _enqueue(self, index: int, now: float) -> None:
        self._ready[index] = now
        resource = self._tasks[index].resource
        if resource in self._serving:
            self._queues[resource].append(index)
        else:
            self._start(index, now)

    def _start(self, index: int, now: float) -> None:
        task = self._tasks[index]
        self._serving[task.resource] = index
        self._starts[index] = now
        self._left[index] = (task.seconds, now, 1.0)
        heapq.heappush(self._due, (now + task.seconds, index))
        if not self._shares:
            return
        if task.kind == "compute":
            self._computing[task.rank] = index
        else:
            for rank in task.ends:
                self._moving[rank].append(index)
        self._adjust(task, now)

    def _finish(self, index: int, now: float) -> None:
        task = self._tasks[index]
        del self._left[index]
        self._ends[index] = now
        del self._serving[task.resource]
        if self._shares:
            if task.kind == "compute":
                self._computing[task.rank] = None
            else:
                for rank in task.ends:
                    self._moving[rank].remove(index)
            self._adjust(task, now)
        queue = self._queues.get(task.resource)
        if queue:
            self._start(queue.popleft(), now)
        for follower in self._followers[index]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._enqueue(follower, now)

    def _adjust(self, changed: Task, now: float) -> None:
        """New speeds of what runs at the ranks that a task concerns, after it began or ended."""
        for rank in changed.ends:
            computing, moving = self._computing[rank], self._moving[rank]
            if computing is not None:
                # An exchange, in which a profile measures it, sends and receives: each counts for half.
                self._run_at(computing, now, 1 - (1 - self._sharing.compute) * min(len(moving), 2) / 2)
            for index in moving:
                ends = self._tasks[index].ends
                busy = sum(self._computing[end] is not None for end in ends) / len(ends)
                self._run_at(index, now, 1 - (1 - self._sharing.transfer) * busy)

    def _run_at(self, index: int, now: float, speed: float) -> None:
        left, since, before = self._left[index]
        # Nothing runs at no speed at all: what two exposures of 1 leave is half of both.
        speed = max(speed, 1e-9)
        if speed == before:
            return
        self._left[index] = (max(0.0, left - (now - since) * before), now, speed)
        rest = self._left[index]
        heapq.heappush(self._due, (rest[1] + rest[0] / rest[2], index))
